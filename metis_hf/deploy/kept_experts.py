"""Names of the dense parts of a mixture of experts that are not nn.Linear, for the exclude list.

transformers stores the experts of a layer as fused parameters, and most routers as custom modules.
Engines represent both as layers, and quantize them unless the checkpoint's config excludes them
under the names that its files use.
"""

from __future__ import annotations

from itertools import takewhile

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from metis_hf.layers.experts import fused_weights, is_fused_experts, packed_names


def kept_experts(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return (dense fused experts, routers that are not nn.Linear), by their names in files.

    A router is a sibling module of the experts whose `weight` is a matrix.
    """
    experts, routers = [], []
    for name, module in model.named_modules():
        if not (is_fused_experts(module) or packed_names(module)):
            continue
        if fused_weights(module):
            experts.append(_name_in_files(model, name))
        parent, _, own = name.rpartition(".")
        for child, sibling in model.get_submodule(parent).named_children():
            weight = sibling._parameters.get("weight")
            is_matrix = weight is not None and weight.dim() == 2
            if child != own and is_matrix and not isinstance(sibling, torch.nn.Linear):
                routers.append(_name_in_files(model, f"{parent}.{child}" if parent else child))
    return experts, routers


def _name_in_files(model: PreTrainedModel, name: str) -> str:
    """Return the name under which `save_pretrained` writes the parameters of a module."""
    state = {
        f"{name}.{key}": torch.empty_like(value, device="meta")
        for key, value in model.get_submodule(name).named_parameters()
    }
    owners = [key.split(".")[:-1] for key in revert_weight_conversion(model, state)]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*owners))
    return ".".join(parts[0] for parts in common)
