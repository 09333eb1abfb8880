"""Spectra of a model's weights, activations and gradients, and what four bits do to them.

`metis-hf analyze` calls `analyze`. Weights are streamed from safetensors, one matrix at a time;
activations and gradients come from a batch of text. Every figure is written as a PNG and a JSON of
its data; `index.html` shows all figures.
"""

from metis_hf.lab.analyze.checkpoint_analysis import analyze

__all__ = ["analyze"]
