"""Model card sections on how a converted model computes, loads and is served.

Used in the cards of checkpoints and exports (`deploy.model_card`), and in Trainer's.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from torch import nn

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.report import ConversionReport
from metis_hf.layers.experts import converted_names
from metis_hf.layers.linear import MetisLayer
from metis_hf.numerics import NVFP4, Quantizer
from metis_hf.numerics.formats import BlockFormat
from metis_hf.operands.weight_forms import HIGH_PRECISION_BITS
from metis_hf.schemes.roles import Role
from metis_hf.schemes.states import StaticScales

_FEW_BITS = 4  # most bits of a format with the tag fp4-training
# transformers' Trainer writes this where a model has no name.
_NAMELESS = "is a fine-tuned version of [](https://huggingface.co/) on"
WHAT = "A checkpoint of a model whose converted linear layers compute in {precision}."
NEEDS = "`pip install metis-hf`; without the import, transformers {without}."
_COSTS = (
    "## What it costs\n\nQuantization is emulated, so training and evaluation take longer than in "
    "BF16. Serving an export does not."
)
_SERVE = """## Serve

```bash
metis-hf export {directory} --format compressed-tensors --out nvfp4
vllm serve nvfp4
```

The export packs the weights of converted layers to NVFP4, 4.5 bits per weight instead of 16. vLLM
quantizes {inputs}."""


def converted(model: nn.Module) -> tuple[MetisConfig, ConversionReport] | None:
    """Return (config, report) of a converted model, with or without adapters; else None."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    report = getattr(model, "metis_report", None)
    if isinstance(config, MetisConfig) and isinstance(report, ConversionReport):
        return config, report
    return None


def add_to_trainers_card(path: Path, model: nn.Module, name: str) -> None:
    """Add the sections on precision, loading, cost, serving and config to a card of Trainer's.

    Args:
        path: the card, in the model's directory.
        model: trained; if it is not converted, the card is left unchanged.
        name: the directory or hub name from which the model is loaded.
    """
    if (found := converted(model)) is None:
        return
    config, report = found
    layers = [layer for _, layer in metis_layers(model)]
    card = ModelCard.load(path)
    tags = ["metis", *trained_tags(layers), *format_tags(layers), f"scheme:{config.scheme}"]
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    card.data.base_model = card.data.base_model or None  # PEFT may write ""
    card.data.pipeline_tag = card.data.pipeline_tag or pipeline_tag(model)
    sections = "\n\n".join(
        [
            "## Four bits",
            WHAT.format(precision=precision(layers)),
            f"```text\n{report.text(error=False)}\n```",
            load_section(model, layers, name),
            *use_sections(model, layers, path.parent.name),
            f"## Config\n\n{config_table(config)}",
        ]
    )
    text = card.text.replace(_NAMELESS, "was trained from scratch on").rstrip()
    card.text = f"{text}\n\n{sections}\n"
    card.save(path)


def load_lines(model: nn.Module, name: str) -> str:
    """Return the Python code that loads a converted checkpoint, or adapters on one."""
    library, cls = "transformers", type(model).__name__
    if hasattr(model, "peft_config"):
        library, cls = "peft", "AutoPeftModelForCausalLM"
    return (
        "import metis_hf  # registers the format\n"
        f"from {library} import {cls}\n\n"
        f"model = {cls}.from_pretrained({json.dumps(name, ensure_ascii=False)})"
    )


def load_section(model: nn.Module, layers: Iterable[MetisLayer], name: str) -> str:
    """Return the section with the Python code that loads a checkpoint, and its requirements."""
    needs = NEEDS.format(without=_without_import(model, layers))
    return f"## Load\n\n```python\n{load_lines(model, name)}\n```\n\n{needs}"


def use_sections(model: Any, layers: Sequence[MetisLayer], directory: str) -> list[str]:
    """Return the sections on the cost of emulation and on serving a checkpoint.

    Args:
        model: converted. There is no serving section for adapters, for models that are not causal
            language models, and for formats other than NVFP4 alone.
        layers: the converted ones; if none has a quantizer, there is neither section.
        directory: of the checkpoint.
    """
    if not (formats := _formats(layers)):
        return []
    served = pipeline_tag(model) and not hasattr(model, "peft_config") and formats == [NVFP4]
    states = [layer.scheme.state for layer in layers]
    static = any(isinstance(state, StaticScales) and state.input for state in states)
    inputs = "inputs on GPUs with FP4 units (Blackwell)" if static else "no inputs"
    serve = _SERVE.format(directory=shlex.quote(directory), inputs=inputs)
    return [_COSTS, serve] if served else [_COSTS]


def pipeline_tag(model: Any) -> str | None:
    """Return the hub's task name for a causal language model; None for other models."""
    generates = model.can_generate() and not model.config.is_encoder_decoder
    return "text-generation" if generates else None


def precision(layers: Sequence[MetisLayer]) -> str:
    """Return the bits of weights, activations and gradients with formats, such as "W4A4G4"."""

    def of_layer(layer: MetisLayer) -> str:
        if not any(_quantizers(layer)):
            return "high precision"
        bits = (q.fmt.element.bits if q else int(HIGH_PRECISION_BITS) for q in _quantizers(layer))
        # With calibrated scales, gradients may never have been quantized.
        whose = "WA" if isinstance(layer.scheme.state, StaticScales) else "WAG"
        letters = "".join(f"{letter}{count}" for letter, count in zip(whose, bits))
        return f"emulated {letters} ({', '.join(fmt.name for fmt in _formats([layer]))})"

    counts = Counter(map(of_layer, layers))
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{words} in {count} layers" for words, count in counts.most_common())


def trained_tags(layers: Iterable[MetisLayer]) -> list[str]:
    """Return ["fp4-training"] if a layer trains in at most four bits, else []."""
    trained = _formats(x for x in layers if not isinstance(x.scheme.state, StaticScales))
    few = any(fmt.element.bits <= _FEW_BITS for fmt in trained)
    return ["fp4-training"] if few else []


def format_tags(layers: Iterable[MetisLayer]) -> list[str]:
    """Return the names of the formats that layers are quantized to."""
    return [fmt.name for fmt in _formats(layers)]


def config_table(config: MetisConfig) -> str:
    """Return the config as a Markdown table, with values other than the default in bold."""
    default = MetisConfig().to_dict()
    lines = ["| Option | Value |", "| --- | --- |"]
    for key, value in config.to_dict().items():
        text = json.dumps(value).replace("|", "\\|")
        lines.append(f"| {key} | {f'**`{text}`**' if value != default.get(key) else f'`{text}`'} |")
    return "\n".join(lines)


def _quantizers(layer: MetisLayer) -> tuple[Quantizer | None, ...]:
    """Return the quantizers of a layer's weight, input and output gradient in training."""
    roles = (Role.FPROP_WEIGHT, Role.FPROP_INPUT, Role.DGRAD_GRAD_OUTPUT)
    return tuple(layer.scheme.resolve(role)[1].quantizer for role in roles)


def _formats(layers: Iterable[MetisLayer]) -> list[BlockFormat]:
    """Return the formats of weights, inputs and gradients, each once."""
    found = (quantizer.fmt for layer in layers for quantizer in _quantizers(layer) if quantizer)
    return list(dict.fromkeys(found))


def _without_import(model: nn.Module, layers: Iterable[MetisLayer]) -> str:
    """Say what transformers does with the checkpoint if metis_hf is not imported."""
    experts = any(converted_names(module) for module in model.modules())
    if experts or any(layer.weight_form.is_split for layer in layers):
        return "reports missing weights"
    return "warns, and loads the weights into a plain model in high precision"
