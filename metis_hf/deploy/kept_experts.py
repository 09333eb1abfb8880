"""Names of the parts of a packed mixture of experts that stay dense and are no nn.Linear.

transformers holds the experts of a layer as fused parameters, and most routers are modules of their
own. Engines hold both as layers that they quantize unless the checkpoint's config excludes them,
and ask for them by the names in its files.
"""

from __future__ import annotations

from itertools import takewhile

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from metis_hf.layers.experts import fused_weights, is_fused_experts, packed_names


def kept_experts(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return dense fused experts, and routers that are no nn.Linear, by their names in files.

    A router is a module beside the experts with a matrix of its own.
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
