"""Several processes, and parameters of which each holds a part: recognized, and whole again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from metis_hf.layers.linear import MetisLayer


def several_processes() -> bool:
    """Return whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(param: nn.Parameter) -> bool:
    """Return whether FSDP2 (a DTensor) or ZeRO-3 shards a parameter."""
    return hasattr(param, "full_tensor") or hasattr(param, "ds_id")


def full_tensor(param: Tensor) -> Tensor:
    """Return a parameter without its gradient, gathered from all processes if FSDP2 shards it.

    Every process has to call it.
    """
    param = param.detach()
    return param.full_tensor() if hasattr(param, "full_tensor") else param  # type: ignore[operator]


def whole_params(layer: MetisLayer) -> list[Tensor]:
    """Return a layer's stored weight, gathered where FSDP2 or ZeRO-3 shards it.

    Every process has to call it.
    """
    if not any(hasattr(param, "ds_id") for param in layer.parameters()):
        return [full_tensor(param) for param in layer.weight_params()]
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(layer.parameters())):
        return [param.detach().clone() for param in layer.weight_params()]
