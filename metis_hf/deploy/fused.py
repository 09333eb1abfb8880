"""Tensor scales of layers that engines fuse: query, key and value; gate and up.

vLLM fuses such layers and uses one tensor scale for all of them: in compressed-tensors' layout the
largest encode scale, and without a warning if only weights are quantized. Layers that were packed
under another scale then decode to wrong values.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.deployed import deployed_groups
from metis_hf.deploy.compressed_tensors import (
    CompressedMatrix,
    is_split,
    static_scales,
    weight_quantizer,
)
from metis_hf.deploy.source import represented
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.packed import PackedWeight

OWN_SCALES = (
    "Layers that inference engines fuse (query, key and value; gate and up) each have their own "
    "tensor scale in this checkpoint. vLLM uses one scale for all of them and computes wrong "
    "values: load this checkpoint in transformers, or export it with shared scales."
)
NO_SHARED_SCALE = (
    "Layers that inference engines fuse (query, key and value; gate and up) are packed under "
    "different tensor scales in this checkpoint, because the scheme of some has no tensor scale. "
    "vLLM uses one scale for all of them and computes wrong values: load this checkpoint in "
    "transformers."
)
SHARED_SCALES = (
    "Layers that inference engines fuse (query, key and value; gate and up) are packed under one "
    "shared tensor scale. In training each layer had its own scale, so some codes differ from "
    "training."
)
NOT_SERVED = (OWN_SCALES, NO_SHARED_SCALE)

MIXED_END = (
    "vLLM rejects such a checkpoint: load it with metis_hf.load_packed, or use the same scheme for "
    "these layers."
)
MIXED = "Layers that inference engines fuse are quantized in different ways in {0}: {1}. "


@torch.no_grad()
def shared_amaxes(model: nn.Module) -> dict[str, Tensor]:
    """Return layer name -> shared amax, for each layer that engines fuse with others.

    The amax is 0-dim fp32: the largest magnitude over all weights of the group. Layers with
    calibrated scales, which are shared already, and layers without a tensor scale are left out.
    """
    layers = {
        name: layer
        for name, layer in metis_layers(model)
        if static_scales(layer) is None
        and (quantizer := weight_quantizer(layer)) is not None
        and quantizer.two_level
    }
    groups = {name: group for name, group in deployed_groups(layers).items() if len(group) > 1}
    amaxes = {name: represented(layers[name]).abs().amax() for name in groups}
    return {
        name: torch.stack([amaxes[member] for member in group]).amax()
        for name, group in groups.items()
    }


@torch.no_grad()
def share_others(
    model: nn.Module, packed: Mapping[str, CompressedMatrix]
) -> dict[str, CompressedMatrix]:
    """Repack layers whose group still has several tensor scales, under one scale per group.

    Fused layers may use schemes with different scale rules, or only some may have calibrated
    scales; one amax then gives several tensor scales. The group's smallest encode scale covers all
    its weights. Return the repacked matrices by layer; layers that keep their scale are left out.
    """
    layers, found = dict(metis_layers(model)), {}
    for group in _apart(packed):
        quantizers = {name: weight_quantizer(layers[name]) for name in group}
        if all(quantizer is not None and quantizer.two_level for quantizer in quantizers.values()):
            scale = torch.stack([packed[name].global_scale for name in group]).amin(0)
            for name, quantizer in quantizers.items():
                if not torch.equal(packed[name].global_scale, scale):
                    weight = represented(layers[name])
                    again = PackedWeight.of(weight, scale.clone(), quantizer=quantizer)  # type: ignore[arg-type]
                    found[name] = CompressedMatrix(*again, columns=weight.shape[1])
    return found


def _apart(packed: Mapping[str, CompressedMatrix]) -> list[tuple[str, ...]]:
    """Return the groups of fused layers that have more than one tensor scale."""
    return [
        group
        for group in dict.fromkeys(deployed_groups(packed).values())
        if len({packed[name].global_scale.item() for name in group}) > 1
    ]


def scale_notes(
    model: nn.Module,
    packed: Mapping[str, CompressedMatrix],
    amaxes: Mapping[str, Tensor],
    moved: bool,
    shared: bool,
) -> tuple[str, ...]:
    """Return notes for the report on the tensor scales of packed layers that engines fuse.

    Args:
        model: still converted.
        packed: the written matrices, by layer.
        amaxes: result of `shared_amaxes`; empty if scales are not shared.
        moved: whether `share_others` changed any scale.
        shared: whether sharing was requested.
    """
    layers, notes = dict(metis_layers(model)), []
    if _apart(packed):
        notes.append(NO_SHARED_SCALE if shared else OWN_SCALES)

    def has_moved(name: str) -> bool:
        layer = layers[name]
        return not is_split(layer) and bool(layer.weight_params()[-1].abs().amax() != amaxes[name])

    if moved or any(has_moved(name) for name in amaxes):
        notes.append(SHARED_SCALES)
    return tuple(notes)


def mixed_notes(
    model: nn.Module, packed: Container[str], inputs: Container[str]
) -> tuple[str, ...]:
    """Return a note for the report if fused layers are quantized in different ways.

    `packed` names the packed layers, and `inputs` the layers whose inputs are quantized.
    """
    layers = {name for name, m in model.named_modules() if isinstance(m, nn.Linear | MetisLayer)}
    for group in deployed_groups(sorted(layers)).values():
        kinds = {name: "W4A4" if name in inputs else "W4A16" for name in group if name in packed}
        if len({kinds.get(name) for name in group}) > 1:
            parts = [f"{name.rpartition('.')[2]} {kinds.get(name, 'dense')}" for name in group]
            return (MIXED.format(group[0].rpartition(".")[0], ", ".join(parts)) + MIXED_END,)
    return ()
