"""Refusals of adapter configs that a converted or packed base cannot serve."""

from __future__ import annotations

import copy
from typing import Any

from peft import LoraConfig
from torch import nn

from metis_hf.conversion.matching import ends
from metis_hf.layers.experts import converted_names
from metis_hf.layers.packed import packed_layers


def check_saved(config: LoraConfig, model: nn.Module) -> None:
    """Refuse packed layers in `modules_to_save`: PEFT would copy them and never train them."""
    saved = set(config.modules_to_save or ())
    for name in packed_layers(model):
        if saved & {*name.split("."), name}:
            raise ValueError(
                f"modules_to_save={sorted(saved)} would train {name} in full, but its weight is "
                "packed in NVFP4 and frozen. Name it in target_modules to train an adapter on it, "
                "or unpack the model first (metis_hf.to_dense)"
            )


_NAMES = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")


def names_of(config: LoraConfig) -> dict[str, Any]:
    """Return the module names in an adapter's config, before PEFT rewrites some for experts."""
    return {name: copy.copy(getattr(config, name)) for name in _NAMES}


def put_names_back(config: LoraConfig, asked: dict[str, Any], model: nn.Module) -> None:
    """Undo PEFT's rewrite of full layer names, such as those "all-linear" expands to.

    For model types with fused experts PEFT rewrites every `..gate_proj` to an expert parameter,
    even in dense layers and shared experts.
    """
    targets = asked["target_modules"]
    if targets is None or isinstance(targets, str) or isinstance(config.target_modules, str):
        return
    lost = set(targets).difference(config.target_modules or ())
    if lost and lost <= {name for name, _ in model.named_modules()}:
        for name, value in asked.items():
            setattr(config, name, value)


def check_experts(config: LoraConfig, model: nn.Module) -> None:
    """Refuse names of fused expert weights that conversion replaced with layers.

    PEFT would find no such parameter and leave the experts without an adapter.

    Args:
        config: with names as PEFT rewrote them: Mixtral's "w1" has become "gate_up_proj".
        model: the base.
    """
    replaced = [
        (experts, key)
        for experts, module in model.named_modules()
        for key in converted_names(module)
    ]
    if not replaced:
        return
    listed = set() if isinstance(config.target_modules, str) else {*(config.target_modules or ())}
    layers = {f"metis_{key}" for _, key in replaced}
    if any(layers.intersection(target.split(".")) for target in listed):
        return  # made for a converted base; PEFT may have added the other names
    named = {end for experts, key in replaced for end in ends(f"{experts}.{key}")}
    modules = {end for name, _ in model.named_modules() for end in ends(name)}
    asked = {
        "target_parameters": named & {*(config.target_parameters or ())},
        "target_modules": (named & listed) - modules,
    }
    for option, entries in asked.items():
        for experts, key in replaced:
            if entries.isdisjoint(ends(f"{experts}.{key}")):
                continue
            raise ValueError(
                f"the adapter targets fused experts ({option}: {', '.join(sorted(entries))}), "
                f"which conversion replaced with one layer per expert ({experts}.{key}); PEFT "
                'would skip them. Target the layers: target_modules="all-linear", or their names, '
                f"{experts}.metis_{key}.0 and so on. An adapter that was trained on fused experts "
                "needs a base whose experts are not converted: "
                f"MetisConfig(modules_to_not_convert=[{experts.rpartition('.')[2]!r}])"
            )
