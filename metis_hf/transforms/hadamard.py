"""Randomized Hadamard rotation in blocks of 16, as in NVIDIA's recipe (arXiv 2509.25149)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.noise import random_bits

SIZE = 16


def hadamard_matrix(seed: int) -> Tensor:
    """Sylvester's 16 x 16 matrix / 4, columns multiplied by one random sign vector; orthonormal."""
    h = torch.ones(1, 1)
    while h.shape[0] < SIZE:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = 1.0 - 2.0 * (random_bits(SIZE, seed) < 0)
    return h / SIZE**0.5 * signs


_cached_matrix = functools.lru_cache(maxsize=32)(hadamard_matrix)


def _matrix(seed: int) -> Tensor:
    # torch.compile would trace through a cache, with a warning.
    return hadamard_matrix(seed) if torch.compiler.is_compiling() else _cached_matrix(seed)


def _apply(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    blocks = F.pad(x.movedim(dim, 0), [0, 0] * (x.dim() - 1) + [0, -n % SIZE])
    out = torch.einsum("hj,bjc->bhc", matrix.to(x), blocks.reshape(-1, SIZE, x.numel() // n))
    return out.reshape(blocks.shape).movedim(0, dim)


def rotate(x: Tensor, *, dim: int, seed: int) -> Tensor:
    """Rotates every block of 16 along `dim`, zero-padded to whole blocks.

    Returns:
        `x` rotated; its size along `dim` rounded up to a multiple of 16.
    """
    return x if x.numel() == 0 else _apply(x, _matrix(seed), dim)


def unrotate(x: Tensor, *, dim: int, seed: int) -> Tensor:
    """Inverse of `rotate`, padding included: what is added to x in between reaches it."""
    return x if x.numel() == 0 else _apply(x, _matrix(seed).T, dim)
