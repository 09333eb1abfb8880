"""README.md of a checkpoint: what it is, how it was quantized, how to load it.

For directories that `save_pretrained` or `metis-hf export` wrote. Nothing is invented: what is not
known here (licence, data, language) stays out of the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.conversion.report import ConversionReport

KINDS = ("metis", "dense", "compressed-tensors", "w4a4", "modelopt", "side-file")
_TAGS = {
    "metis": ("metis", "fp4-training", "nvfp4"),
    "dense": ("fp4-training",),
    "compressed-tensors": ("fp4-training", "nvfp4", "compressed-tensors"),
    "w4a4": ("nvfp4", "compressed-tensors"),
    "modelopt": ("nvfp4", "modelopt"),
    "side-file": ("metis", "fp4-training", "nvfp4"),
}
_WHAT = {
    "metis": "A checkpoint of a model trained with emulated FP4 (W4A4G4); its linear layers "
    "compute as in training.",
    "dense": "The dense weights that a model trained with emulated FP4 (W4A4G4) represents, as a "
    "plain transformers checkpoint.",
    "compressed-tensors": "The weights of a model trained with emulated FP4 (W4A4G4), packed to "
    "NVFP4 in the compressed-tensors layout `nvfp4-pack-quantized`. Activations are not quantized.",
    "w4a4": "A model packed to NVFP4 in the compressed-tensors layout `nvfp4-pack-quantized`. The "
    "inputs of its packed layers are quantized too (W4A4), under calibrated tensor scales.",
    "modelopt": "A model packed to NVFP4 as NVIDIA's ModelOpt lays it out; `hf_quant_config.json` "
    "says which layers are packed, and whether their inputs are quantized too.",
    "side-file": "The weights of a model trained with emulated FP4 (W4A4G4): residuals packed to "
    "NVFP4 in `residual/`, low-rank factors in `metis_low_rank.safetensors`. The residuals alone "
    "are not the model.",
}
_NEEDS = {
    "metis": "`pip install metis-hf`; without the import, transformers reports missing weights.",
    "dense": "Needs transformers alone.",
    "compressed-tensors": "Needs transformers and `pip install compressed-tensors`.",
    "w4a4": "Needs transformers and `pip install compressed-tensors`.",
    "modelopt": "For engines that read ModelOpt's checkpoints; transformers does not.",
    "side-file": "`pip install metis-hf`; the compressed-tensors library is not needed.",
}


def model_card(
    model: PreTrainedModel,
    *,
    name: str = "this directory",
    kind: str = "metis",
    results: Mapping[str, Any] | None = None,
) -> ModelCard:
    """Return the card of a converted model, or of what is exported from it.

    Args:
        model: converted; its config and its conversion report are shown.
        name: the path or hub name to show in the line that loads it.
        kind: "metis" for the checkpoint itself, otherwise the kind of export: "dense",
            "compressed-tensors", "w4a4" for that with quantized inputs, "modelopt" or "side-file".
        results: metrics by name, in nested mappings as an evaluation writes them; what is not a
            number is left out.

    Raises:
        ValueError: an unknown kind, or a model that was not converted.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; choose one of {', '.join(KINDS)}")
    config = getattr(model.config, "quantization_config", None)
    report = getattr(model, "metis_report", None)
    if not isinstance(config, MetisConfig) or not isinstance(report, ConversionReport):
        raise ValueError("the model has no Metis config; call get_metis_model first")
    generates = model.can_generate() and not model.config.is_encoder_decoder
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation" if generates else None,
        tags=[*_TAGS[kind], f"scheme:{config.scheme}"],
    )
    # How well the split reproduced the weights when they were converted says nothing by now.
    coverage = report.text(error=False)
    parts = [
        f"# {type(model).__name__}, scheme {config.scheme}",
        _WHAT[kind],
        f"## Load\n\n```python\n{load_lines(model, kind, name)}\n```\n\n{_NEEDS[kind]}",
        f"## Conversion\n\n```text\n{coverage}\n```",
        f"## Config\n\n{_config_table(config)}",
    ]
    if results:
        rows = "\n".join(f"| {key} | {value:.6g} |" for key, value in _numbers(results))
        parts.append(f"## Results\n\n| Metric | Value |\n| --- | ---: |\n{rows}")
    body = "\n\n".join(parts)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def write_model_card(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    kind: str = "metis",
    results: Mapping[str, Any] | str | Path | None = None,
) -> Path:
    """Write `model_card` to README.md of a directory and returns its path.

    Args:
        results: also the path of a JSON file.
    """
    directory = Path(directory)
    metrics = json.loads(Path(results).read_text()) if isinstance(results, str | Path) else results
    card = model_card(model, name=directory.name, kind=kind, results=metrics)
    path = directory / "README.md"
    card.save(path)
    return path


def load_lines(model: PreTrainedModel, kind: str, name: str) -> str:
    """Return the Python that loads a directory of some kind, of the class that `model` is."""
    if kind == "side-file":
        first = "from metis_hf.export import load_low_rank"
        return f'{first}\n\nmodel = load_low_rank("{name}")'
    if kind == "modelopt":
        return f'from vllm import LLM\n\nmodel = LLM("{name}")'
    first = "import metis_hf  # registers the format\n" if kind == "metis" else ""
    cls = type(model).__name__
    return f'{first}from transformers import {cls}\n\nmodel = {cls}.from_pretrained("{name}")'


def _config_table(config: MetisConfig) -> str:
    """Return what was chosen; a value that is not the default is set in bold."""
    default = MetisConfig().to_dict()
    lines = ["| Option | Value |", "| --- | --- |"]
    for key, value in config.to_dict().items():
        text = json.dumps(value).replace("|", "\\|")
        lines.append(f"| {key} | {f'**`{text}`**' if value != default.get(key) else f'`{text}`'} |")
    return "\n".join(lines)


def _numbers(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in results.items():
        label = f"{prefix}{key}".removesuffix(",none")
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{label} / ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield label, value
