"""Distances between a quantized tensor and the original."""

from __future__ import annotations

import torch
from torch import Tensor


def sqnr_db(x: Tensor, x_hat: Tensor) -> Tensor:
    """Return the SQNR, 10 log10(|x|^2 / |x - x_hat|^2), in dB; 0-dim.

    Infinite if they are equal; NaN if both are zero or `x` is not finite.
    """
    x, x_hat = x.detach().double(), x_hat.detach().double()
    return 10 * torch.log10(x.square().sum() / (x - x_hat).square().sum())


def relative_error(x: Tensor, x_hat: Tensor) -> Tensor:
    """Return |x - x_hat| / |x| in the Frobenius norm; 0-dim."""
    x, x_hat = x.detach().double(), x_hat.detach().double()
    return torch.linalg.vector_norm(x - x_hat) / torch.linalg.vector_norm(x)
