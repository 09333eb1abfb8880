"""Tensor scales of layers that engines run as one: query, key and value; gate and up.

vLLM joins such layers and takes one tensor scale for all of them: in compressed-tensors' layout the
largest encode scale, for weights alone without a word. The blocks of a layer whose own scale is
another one then decode to wrong values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.deployed import deployed_groups
from metis_hf.export.compressed_tensors import (
    CompressedMatrix,
    is_split,
    static_scales,
    weight_quantizer,
)

OWN_SCALES = (
    "Layers that engines run as one (query, key and value; gate and up) have tensor scales of "
    "their own here. vLLM takes one for all of them and then computes wrong values: load this "
    "checkpoint in transformers, or export it with shared scales."
)
SHARED_SCALES = (
    "Layers that engines run as one (query, key and value; gate and up) are packed under one "
    "tensor scale. In training each had a scale of its own, so codes differ from those there."
)


@torch.no_grad()
def shared_amaxes(model: nn.Module) -> dict[str, Tensor]:
    """Return what the tensor scale of each layer is made of, where it is deployed with others.

    0-dim fp32: the largest magnitude of all their weights. Without the layers of calibrated scales,
    which share theirs already, and of quantizers that have no tensor scale.
    """
    layers = {
        name: layer
        for name, layer in metis_layers(model)
        if static_scales(layer) is None
        and (quantizer := weight_quantizer(layer)) is not None
        and quantizer.two_level
    }
    groups = {name: group for name, group in deployed_groups(layers).items() if len(group) > 1}
    amaxes = {}
    for name in groups:
        layer = layers[name]
        weight = layer.weight_form.dense(layer.weight_params()).detach().float()
        amaxes[name] = weight.abs().amax()
    return {
        name: torch.stack([amaxes[member] for member in group]).amax()
        for name, group in groups.items()
    }


def scale_notes(
    model: nn.Module, packed: Mapping[str, CompressedMatrix], amaxes: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return what to say of the tensor scales of packed layers that are deployed as one.

    Args:
        model: still converted.
        packed: what is written, by layer.
        amaxes: those of `shared_amaxes` that were used.
    """
    layers, notes = dict(metis_layers(model)), []
    groups = set(deployed_groups(packed).values())
    if any(len({packed[name].global_scale.item() for name in group}) > 1 for group in groups):
        notes.append(OWN_SCALES)

    def moved(name: str) -> bool:
        layer = layers[name]
        return not is_split(layer) and bool(layer.weight_params()[-1].abs().amax() != amaxes[name])

    if any(moved(name) for name in amaxes):
        notes.append(SHARED_SCALES)
    return tuple(notes)
