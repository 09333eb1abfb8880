"""Hadamard rotation in blocks of 16: with random signs (arXiv 2509.25149), or none (2605.09825)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.noise import constant, random_bits
from metis_hf.transforms.rotation import sylvester

SIZE = 16


def hadamard_matrix(seed: int | None, device: torch.device | str = "cpu") -> Tensor:
    """Return Sylvester's 16 x 16 matrix / 4, columns times one sign vector; orthonormal, fp32.

    Args:
        seed: of the signs; None: no signs, so that the matrix is its own inverse.
        device: that the matrix is made on, with the same bits.
    """
    matrix = sylvester(SIZE, torch.float32, device)
    if seed is None:
        return matrix
    return matrix * (1.0 - 2.0 * (random_bits(SIZE, seed, device) < 0))


@constant
def _matrix(seed: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    return hadamard_matrix(seed, device).to(dtype)


def _apply(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    dim %= x.dim()
    missing = -x.shape[dim] % SIZE
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])
    if dim == x.dim() - 1:
        return (x.reshape(-1, SIZE) @ matrix.T).view(x.shape)
    # [.. b 16 c]: one small product for each block, along rows as they lie in memory.
    blocks = x.reshape(*x.shape[:dim], -1, SIZE, x.shape[dim + 1 :].numel())
    return (matrix @ blocks).view(x.shape)


def rotate(x: Tensor, *, dim: int, seed: int | None) -> Tensor:
    """Rotate every block of 16 along `dim`, zero-padded to whole blocks; `seed` of the signs.

    Returns:
        `x` rotated; its size along `dim` rounded up to a multiple of 16.
    """
    return x if x.numel() == 0 else _apply(x, _matrix(seed, x.device, x.dtype), dim)


def unrotate(x: Tensor, *, dim: int, seed: int | None) -> Tensor:
    """Invert `rotate`, padding included: what is added to x in between reaches it."""
    return x if x.numel() == 0 else _apply(x, _matrix(seed, x.device, x.dtype).T, dim)


def padded_shape(shape: tuple[int, int], *, dim: int) -> tuple[int, int]:
    """Return the shape [t c] with its dimension `dim` rounded up to a multiple of 16."""
    rows, columns = shape
    missing = -shape[dim] % SIZE
    return (rows, columns + missing) if dim % 2 else (rows + missing, columns)
