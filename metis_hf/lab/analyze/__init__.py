"""Spectra of a model's weights, activations and gradients, and what four bits do to them.

`metis-hf analyze` calls `analyze`: weights are streamed from safetensors, one matrix at a time;
activations and gradients come from a batch of text. Every figure is a PNG and the JSON it is drawn
from; `index.html` shows them all.
"""

from metis_hf.lab.analyze.checkpoint_analysis import analyze

__all__ = ["analyze"]
