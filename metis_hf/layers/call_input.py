"""Checks of a layer's input, and the dtype of its GEMMs."""

from __future__ import annotations

import torch
from torch import Tensor


def check_input(name: str, x: Tensor, width: int) -> None:
    """Check that a layer can read x [... i] with i = `width`.

    Raises:
        ValueError: x has another width, or is not of a floating-point dtype.
    """
    if x.dim() == 0 or x.shape[-1] != width:
        own = f"width {x.shape[-1]}" if x.dim() else "no width"
        raise ValueError(
            f"{name} expects inputs of width {width}, but this input has {own}: its shape is "
            f"{tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(
            f"{name} expects inputs of a floating-point dtype, but this input is {x.dtype}; "
            "convert it first, for example with x.float()"
        )


def check_dtype(name: str, x: Tensor, weight: Tensor) -> None:
    """Check that the dtypes of an input and a weight allow a GEMM, as torch's own layers do.

    Raises:
        ValueError: the dtypes differ, and autocast does not unify them.
    """
    if x.dtype is weight.dtype:
        return
    autocast = torch.is_autocast_enabled(x.device.type)
    if not autocast or torch.float64 in (x.dtype, weight.dtype):
        raise ValueError(
            f"{name} has a weight of {weight.dtype}, but its input is {x.dtype}: convert one to "
            "the other's dtype, or call the model under torch.autocast"
        )


def gemm_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of GEMMs with input x and of their outputs: the dtype of x, or autocast's.

    As in torch's own layers, autocast does not change float64.
    """
    device = x.device.type
    if x.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
