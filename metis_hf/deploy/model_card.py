"""README.md of a checkpoint: what it is, how it was quantized, how to load it.

For directories that `save_pretrained` or `metis-hf export` wrote. Nothing is invented: what is not
known here (licence, data, language) stays out of the metadata.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn
from transformers import PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.report import ConversionReport
from metis_hf.deploy.compressed_tensors import static_scales
from metis_hf.deploy.loading import load_lines
from metis_hf.layers.experts import converted_names
from metis_hf.layers.linear import MetisLayer
from metis_hf.numerics import NVFP4, Quantizer
from metis_hf.numerics.formats import BlockFormat
from metis_hf.operands.weight_forms import HIGH_PRECISION_BITS
from metis_hf.schemes.roles import Role
from metis_hf.shared.records import read_json

KINDS = ("metis", "dense", "compressed-tensors", "w4a4", "modelopt", "side-file")
_TAGS = {
    "metis": ("metis",),
    "dense": (),
    "compressed-tensors": ("compressed-tensors",),
    "w4a4": ("compressed-tensors",),
    "modelopt": ("modelopt",),
    "side-file": ("metis",),
}
_PACKED = ("compressed-tensors", "w4a4", "modelopt", "side-file")  # to NVFP4, whatever the scheme
# {precision}: as `_precision` says it.
_WHAT = {
    "metis": "A checkpoint of a model whose converted linear layers compute in {precision}.",
    "dense": "The dense weights of a model whose converted linear layers compute in {precision}, "
    "as a plain transformers checkpoint.",
    "compressed-tensors": "The weights of a model whose converted linear layers compute in "
    "{precision}, packed to NVFP4 in the compressed-tensors layout `nvfp4-pack-quantized`. "
    "Activations are not quantized.",
    "w4a4": "A model packed to NVFP4 in the compressed-tensors layout `nvfp4-pack-quantized`. The "
    "inputs of its packed layers are quantized too (W4A4), under calibrated tensor scales.",
    "modelopt": "A model packed to NVFP4 as NVIDIA's ModelOpt lays it out; `hf_quant_config.json` "
    "says which layers are packed, and whether their inputs are quantized too.",
    "side-file": "The weights of a model whose converted linear layers compute in {precision}: "
    "residuals packed to NVFP4 in `residual/`, low-rank factors in `metis_low_rank.safetensors`. "
    "The residuals alone are not the model.",
}
_NEEDS = {
    "metis": "`pip install metis-hf`; without the import, transformers {without}.",
    "dense": "Needs transformers alone.",
    "compressed-tensors": "Needs transformers and `pip install compressed-tensors`.",
    "w4a4": "Needs transformers and `pip install compressed-tensors`.",
    "modelopt": "For engines that read ModelOpt's checkpoints; transformers does not.",
    "side-file": "`pip install metis-hf`; the compressed-tensors library is not needed.",
}
_FEW_BITS = 4  # the tag fp4-training stands for


def model_card(
    model: PreTrainedModel,
    *,
    name: str = "this directory",
    kind: str = "metis",
    results: Mapping[str, Any] | None = None,
) -> ModelCard:
    """Return the card of a converted model, or of an export of it.

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
    layers = [layer for _, layer in metis_layers(model)]
    generates = model.can_generate() and not model.config.is_encoder_decoder
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation" if generates else None,
        tags=[*_TAGS[kind], *_tags_of(layers, kind), f"scheme:{config.scheme}"],
    )
    # How well the split reproduced the weights when they were converted says nothing by now.
    coverage = report.text(error=False)
    needs = _NEEDS[kind].format(without=_without_import(model, layers))
    parts = [
        f"# {type(model).__name__}, scheme {config.scheme}",
        _WHAT[kind].format(precision=_precision(layers)),
        f"## Load\n\n```python\n{load_lines(model, kind, name)}\n```\n\n{needs}",
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
    """Write `model_card` to README.md of a directory, and return its path.

    Args:
        results: also the path of a JSON file.

    Raises:
        ValueError: as `model_card` and `read_metrics`.
    """
    directory = Path(directory)
    metrics = read_metrics(Path(results)) if isinstance(results, str | Path) else results
    card = model_card(model, name=directory.name, kind=kind, results=metrics)
    path = directory / "README.md"
    card.save(path)
    return path


def read_metrics(path: Path) -> dict[str, Any]:
    """Return the metrics of a JSON file.

    Raises:
        ValueError: it holds no JSON object; the message names it.
    """
    metrics = read_json(path)
    if not isinstance(metrics, dict):
        raise ValueError(f"{path} holds no metrics; expected a JSON object of them by name")
    return metrics


def _quantizers(layer: MetisLayer) -> tuple[Quantizer | None, ...]:
    """Return the quantizers of a layer's weight, input and output gradient in training."""
    roles = (Role.FPROP_WEIGHT, Role.FPROP_INPUT, Role.DGRAD_GRAD_OUTPUT)
    return tuple(layer.scheme.resolve(role)[1].quantizer for role in roles)


def _formats(layers: Iterable[MetisLayer]) -> list[BlockFormat]:
    """Return the formats of weights, inputs and gradients, each once."""
    found = (quantizer.fmt for layer in layers for quantizer in _quantizers(layer) if quantizer)
    return list(dict.fromkeys(found))


def _precision(layers: Sequence[MetisLayer]) -> str:
    """Return the bits of weights, activations and gradients in words, and their formats."""

    def of_layer(layer: MetisLayer) -> str:
        if not any(_quantizers(layer)):
            return "high precision"
        bits = (q.fmt.element.bits if q else int(HIGH_PRECISION_BITS) for q in _quantizers(layer))
        # Gradients may never have been quantized, where scales are calibrated.
        whose = "WAG" if static_scales(layer) is None else "WA"
        letters = "".join(f"{letter}{count}" for letter, count in zip(whose, bits))
        return f"emulated {letters} ({', '.join(fmt.name for fmt in _formats([layer]))})"

    counts = Counter(map(of_layer, layers))
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{words} in {count} layers" for words, count in counts.most_common())


def _tags_of(layers: Sequence[MetisLayer], kind: str) -> list[str]:
    """Return the tags that depend on what layers are quantized to."""
    trained = _formats(layer for layer in layers if static_scales(layer) is None)
    few = any(fmt.element.bits <= _FEW_BITS for fmt in trained)
    names = [fmt.name for fmt in _formats(layers)] if kind == "metis" else []
    packed = [NVFP4.name] if kind in _PACKED else []
    return [*(["fp4-training"] if few else []), *packed, *names]


def _without_import(model: nn.Module, layers: Iterable[MetisLayer]) -> str:
    """Say what transformers does with a checkpoint whose format it does not know."""
    experts = any(converted_names(module) for module in model.modules())
    if experts or any(layer.weight_form.is_split for layer in layers):
        return "reports missing weights"
    return "warns, and loads the weights into a plain model in high precision"


def _config_table(config: MetisConfig) -> str:
    """Return the config as a table; a value that is not the default is set in bold."""
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
