"""Detects training with several processes, and gathers sharded parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from metis_hf.layers.parallelism import is_spread

if TYPE_CHECKING:
    from metis_hf.layers.linear import MetisLayer


def full_tensor(param: Tensor) -> Tensor:
    """Return a detached parameter, gathered from all processes if FSDP2 shards it.

    Every process must call it.
    """
    param = param.detach()
    return param.full_tensor() if is_spread(param) else param  # type: ignore[attr-defined]


def whole_params(layer: MetisLayer) -> list[Tensor]:
    """Return a layer's stored weight, gathered if FSDP2 or ZeRO-3 shards it.

    Every process must call it.
    """
    if not any(hasattr(param, "ds_id") for param in layer.parameters()):
        return [full_tensor(param) for param in layer.weight_params()]
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(layer.parameters())):
        return [param.detach().clone() for param in layer.weight_params()]
