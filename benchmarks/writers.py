"""Compare our W4A4 checkpoints with llm-compressor's, from the same models and rows."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from answers import WRITER, ask, beside, logprobs
from safetensors.torch import load_file
from timing import Row
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from metis_hf import MetisConfig, calibrate, get_metis_model, load_packed
from metis_hf.deploy import export_checkpoint
from metis_hf.layers.packed import packed_layers

FILE = "model.safetensors"
KINDS = ("weights", "inputs", "rest")  # kinds of tensors that are exchanged


def written(folder: Path, rows: Tensor, texts: Mapping[str, Tensor]) -> Row:
    """Write a folder's dense model with both tools, calibrated on rows [b n], and compare."""
    theirs, ours = folder / "llm-compressor", folder / "amax"
    version = ask({"compress": folder / "dense", "out": theirs, "rows": rows.tolist()}, WRITER)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    get_metis_model(model, MetisConfig(scheme="w4a4"))
    calibrate(model, rows.split(4), method="amax")  # as llm-compressor does
    model.save_pretrained(folder / "metis-amax")
    export_checkpoint(folder / "metis-amax", ours, format="compressed-tensors")
    a, b = (load_file(path / FILE) for path in (ours, theirs))
    both = sorted(a.keys() & b.keys())
    equal, ratios = defaultdict(list), defaultdict(list)
    for key in both:
        kind = key.rpartition(".")[2]
        equal[kind].append((a[key].float() == b[key].float()).float().mean().item())
        if kind.endswith("_global_scale"):
            ratios[kind].append((a[key] / b[key]).item())
    configs = (json.loads((p / "config.json").read_text()) for p in (ours, theirs))
    return version | {
        "tensors": len(both),
        "other_keys": sorted(a.keys() ^ b.keys()),
        "other_types": [k for k in both if (a[k].dtype, a[k].shape) != (b[k].dtype, b[k].shape)],
        "other_config": other(*(config["quantization_config"] for config in configs)),
        "equal": {kind: statistics.mean(values) for kind, values in equal.items()},
        "ours_over_theirs": {kind: [min(each), max(each)] for kind, each in ratios.items()},
        **exchanged(ours, theirs, load_file(folder / "dense" / FILE), texts),
    }


def other(ours: Any, theirs: Any, where: str = "") -> Row:
    """Return the entries of two configs that differ, by path."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(ours.keys() | theirs.keys())
        found = (other(ours.get(k), theirs.get(k), f"{where}.{k}".lstrip(".")) for k in keys)
        return {path: pair for each in found for path, pair in each.items()}
    return {} if ours == theirs else {where: [ours, theirs]}


def kind_of(key: str) -> str:
    """Return the kind, from KINDS, of a tensor of the layout."""
    last = key.rpartition(".")[2]
    if last == "input_global_scale":
        return "inputs"
    return "weights" if last.startswith("weight_") else "rest"


@torch.no_grad()
def exchanged(
    ours: Path, theirs: Path, dense: Mapping[str, Tensor], texts: Mapping[str, Tensor]
) -> Row:
    """Return the losses of our checkpoint, theirs, and ours with each kind of their tensors."""
    model = load_packed(ours, dtype=torch.float32)
    errors = {"ours": weight_error(model, dense)}
    exact = {text: logprobs(model, prompts) for text, prompts in texts.items()}
    losses: Row = {text: {"ours": -found.mean().item()} for text, found in exact.items()}
    a, b = (load_file(path / FILE) for path in (ours, theirs))
    different = [key for key, value in b.items() if (value.float() != a[key].float()).any()]
    for kind in (*KINDS, "all"):
        taken = [key for key in different if kind_of(key) == kind]
        if not taken and kind != "all":
            continue
        model = load_packed(theirs if kind == "all" else ours, dtype=torch.float32)
        state = model.state_dict()
        for key in taken:
            state[key].copy_(b[key])
        for text, prompts in texts.items():
            losses[text][kind] = beside(logprobs(model, prompts), exact[text])
    errors["llm_compressor"] = weight_error(model, dense)
    return {"weight_error": errors, "losses": losses}


def weight_error(model: PreTrainedModel, dense: Mapping[str, Tensor]) -> float:
    """Return the relative squared error of the packed weights, averaged over layers."""
    errors = []
    for name, layer in packed_layers(model).items():
        weight = dense[f"{name}.weight"].float()
        errors.append(((layer.weight - weight).norm() / weight.norm()).square().item())
    return statistics.mean(errors)


def over_models(rows: Sequence[Row]) -> Row:
    """Return the loss that their tensors add to ours: mean, standard error, range over models."""
    found: Row = {}
    for text in rows[0]["losses"]:
        for kind in ("weights", "inputs", "all"):
            each = [row["losses"][text][kind]["difference"] for row in rows]
            error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
            summary = {"mean": statistics.mean(each), "error": error}
            found.setdefault(text, {})[kind] = summary | {"range": [min(each), max(each)]}
    return found
