"""Code lines that load or serve an export."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from metis_hf.conversion.convert import metis_layers
from metis_hf.deploy.compressed_tensors import weight_quantizer
from metis_hf.deploy.fused import MIXED_END, NOT_SERVED
from metis_hf.deploy.packed import why_not_late
from metis_hf.layers.experts import has_fused_experts


def load_lines(model: PreTrainedModel, kind: str, name: str) -> str:
    """Return the Python code that loads the export in directory `name`, as the class of `model`."""
    shown = json.dumps(name, ensure_ascii=False)
    if kind == "side-file":
        first = "from metis_hf.deploy import load_low_rank"
        return f"{first}\n\nmodel = load_low_rank({shown})"
    if kind == "modelopt":
        return f"from vllm import LLM\n\nmodel = LLM({shown})"
    if kind in ("compressed-tensors", "w4a4") and has_fused_experts(model):
        return f"from metis_hf import load_packed\n\nmodel = load_packed({shown})"
    cls = type(model).__name__
    if kind in ("compressed-tensors", "w4a4") and why_not_packed(model):
        return (
            f"from transformers import CompressedTensorsConfig, {cls}\n\n"
            f"model = {cls}.from_pretrained(\n    {shown},\n"
            "    quantization_config=CompressedTensorsConfig(dequantize=True),\n)"
        )
    return f"from transformers import {cls}\n\nmodel = {cls}.from_pretrained({shown})"


def serve_line(model: PreTrainedModel, kind: str, name: str, notes: Iterable[str]) -> str:
    """Return the command that serves a packed export, or "" if vLLM does not run it correctly.

    `notes` are the notes of the export's report, and `name` is its directory.
    """
    packed = kind in ("compressed-tensors", "w4a4", "modelopt") and model.can_generate()
    wrong = any(note in NOT_SERVED or note.endswith(MIXED_END) for note in notes)
    return f"vllm serve {shlex.quote(name)}" if packed and not wrong else ""


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Return why transformers must decompress a packed export while loading it, or None.

    None also for models with fused experts: transformers cannot read their exports at all.
    """
    if has_fused_experts(model):
        return None
    layers = metis_layers(model)
    packed = {
        name: nn.Linear if layer.origin is None else layer.origin.cls
        for name, layer in layers
        if weight_quantizer(layer) is not None
    }
    return why_not_late(model, packed)
