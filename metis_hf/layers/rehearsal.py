"""Rehearse a layer's step on a few numbers: its quantizers are known before they are needed.

`numerics.kernels.ahead` says what is noted, and why.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from metis_hf.numerics.kernels import ahead

if TYPE_CHECKING:
    from metis_hf.layers.linear import MetisLayer

_BLOCK = 16  # sizes that leave the same remainder take the same programs
_SIZE = 64
_LARGEST_RANK = 64


class _Mode(NamedTuple):
    """The state that decides, beside the config, which quantizers a call needs."""

    training: bool
    trains_weight: bool
    autocast: torch.dtype | None


class LayerRehearsal:
    """A step of a layer like the one it is made from, for `ahead.expect`."""

    def __init__(self, layer: MetisLayer) -> None:
        self._layer = weakref.ref(layer)

    def mode(self) -> Hashable | None:
        """Return the mode of the layer's next call; None where the layer is gone."""
        layer = self._layer()
        if layer is None:
            return None
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        trains = any(param.requires_grad for param in layer.weight_params())
        return _Mode(layer.training, trains, autocast)

    def run(self, mode: Hashable) -> None:
        """Run a forward pass, and a backward pass if the layer trains."""
        layer = self._layer()
        assert isinstance(mode, _Mode)
        if layer is None:
            return
        weight = layer.weight_params()[-1]
        rank = layer.scheme.rank
        rank = rank if rank < _LARGEST_RANK else _LARGEST_RANK + rank % _BLOCK
        # Wide beside the rank, as the layer itself: low-rank factors that save nothing are left.
        size = max(_SIZE, 8 * -(-rank // _BLOCK) * _BLOCK)
        out_features, in_features = (size + side % _BLOCK for side in weight.shape)
        shape = (in_features, out_features) if layer.conv1d else (out_features, in_features)
        kind: Any = type(layer)
        config = replace(layer.config, rank=rank or None, rank_multiple=None)
        numbers = nn.Parameter(_numbers(shape, weight.dtype), mode.trains_weight)
        twin = kind(numbers, None, config, conv1d=layer.conv1d)
        twin.train(mode.training)
        # Under autocast norms give fp32 and products 16 bits.
        for dtype in {weight.dtype, mode.autocast or weight.dtype}:
            x = _numbers((size, in_features), dtype).requires_grad_(mode.training)
            with (
                torch.set_grad_enabled(mode.training),
                torch.autocast("cpu", mode.autocast, enabled=mode.autocast is not None),
            ):
                y = twin(x)
            if mode.training:
                y.float().square().mean().backward()


def expect(layer: MetisLayer) -> None:
    """Say that a layer has been made; one rehearsal stands for all layers like it."""
    weight = layer.weight_params()[-1]
    if layer.scheme.is_high_precision or weight.device.type != "cpu":
        return
    rests = tuple(side % _BLOCK for side in weight.shape)
    rank = layer.scheme.rank
    key = (type(layer), layer.config.to_json(), rank, weight.dtype, rests, layer.conv1d)
    ahead.expect(key, LayerRehearsal(layer))


def _numbers(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a matrix whose rows differ, drawn from no generator."""
    return torch.arange(shape[0] * shape[1]).sin().view(shape).to(dtype)
