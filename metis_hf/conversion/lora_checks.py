"""Refusals of adapters that ask for what a converted or packed base does not have."""

from __future__ import annotations

from peft import LoraConfig
from torch import nn

from metis_hf.conversion.matching import ends
from metis_hf.conversion.packed import packed_layers
from metis_hf.layers.experts import converted_names


def check_saved(config: LoraConfig, model: nn.Module) -> None:
    """Refuse packed layers in `modules_to_save`, which would be copied and never change."""
    saved = set(config.modules_to_save or ())
    for name in packed_layers(model):
        if saved & {*name.split("."), name}:
            raise ValueError(
                f"modules_to_save={sorted(saved)} asks {name} to train in full, and its weight is "
                "packed in NVFP4 and frozen. Name it in target_modules, which puts an adapter "
                "beside it, or make the model dense first (metis_hf.to_dense)"
            )


def check_experts(config: LoraConfig, model: nn.Module) -> None:
    """Refuse names of fused expert weights in whose place conversion has put layers.

    PEFT finds no parameter of the name, and leaves the experts without an adapter.

    Args:
        config: with the names as PEFT looks for them: "w1" of a Mixtral is "gate_up_proj" by then.
        model: the base.
    """
    replaced = [
        (experts, key)
        for experts, module in model.named_modules()
        for key in converted_names(module)
    ]
    named = {end for experts, key in replaced for end in ends(f"{experts}.{key}")}
    asked = {"target_parameters": named & set(config.target_parameters or ())}
    if not isinstance(config.target_modules, str):
        targets = named & set(config.target_modules or ())
        modules = (
            {end for name, _ in model.named_modules() for end in ends(name)} if targets else ()
        )
        asked["target_modules"] = targets.difference(modules)
    for option, entries in asked.items():
        for experts, key in replaced:
            if entries.isdisjoint(ends(f"{experts}.{key}")):
                continue
            raise ValueError(
                f"the adapter asks for fused experts ({option}: {', '.join(sorted(entries))}), in "
                f"whose place conversion has put a layer for each expert ({experts}.{key}); PEFT "
                'would leave them out. Target the layers: target_modules="all-linear", or their '
                f"names, {experts}.metis_{key}.0 and so on. An adapter that was trained on fused "
                "experts runs over a base whose experts are not converted: "
                f"MetisConfig(modules_to_not_convert=[{experts.rpartition('.')[2]!r}])"
            )
