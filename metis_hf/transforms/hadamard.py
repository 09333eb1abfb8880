"""Hadamard rotation in blocks of 16: with random signs (arXiv 2509.25149), or none (2605.09825).

For MS-EDEN (arXiv 2601.22813) also in groups of 16 to 128 entries, with signs from the caller: the
largest groups that divide the dimension, padded to blocks of 16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.noise import constant, random_bits
from metis_hf.numerics.kernels import workspace
from metis_hf.transforms.rotation import sylvester

SIZE = 16


def hadamard_matrix(seed: int | None, device: torch.device | str = "cpu") -> Tensor:
    """Return Sylvester's 16 x 16 matrix / 4 with one random sign per column; orthogonal, fp32.

    Args:
        seed: seed of the signs; None for no signs, so that the matrix is its own inverse.
        device: device of the matrix; the bits are the same on every device.
    """
    matrix = sylvester(SIZE, torch.float32, device)
    if seed is None:
        return matrix
    return matrix * (1.0 - 2.0 * (random_bits(SIZE, seed, device) < 0))


@constant
def _matrix(seed: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    return hadamard_matrix(seed, device).to(dtype)


@constant
def _plain_matrix(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return sylvester(size, dtype, device)


def _apply(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """Multiply every n entries along `dim` of x, zero-padded to whole groups, by matrix [n n]."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"dim={dim} is out of range for a tensor of shape {tuple(x.shape)}; give one of its "
            "dimensions"
        )
    dim %= x.dim()
    size = len(matrix)
    missing = -x.shape[dim] % size
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])
    if dim == x.dim() - 1:
        return workspace.matmul(x.reshape(-1, size), matrix.T).view(x.shape)
    # [.. b n c]: one small product per block, with contiguous rows.
    count, after = x.shape[dim] // size, x.shape[dim + 1 :].numel()
    blocks = x.reshape(*x.shape[:dim], count, size, after)
    return workspace.matmul(matrix, blocks).view(x.shape)


def rotate(x: Tensor, *, dim: int, seed: int | None) -> Tensor:
    """Rotate every block of 16 along `dim`; `seed` is the seed of the signs, None for no signs.

    Returns:
        `x` rotated; its size along `dim` is zero-padded to a multiple of 16.

    Raises:
        IndexError: `dim` is not a dimension of `x`.
    """
    return _apply(x, _matrix(seed, x.device, x.dtype), dim)


def unrotate(x: Tensor, *, dim: int, seed: int | None) -> Tensor:
    """Invert `rotate` but keep the padding, which is nonzero if the rotated x was changed."""
    return _apply(x, _matrix(seed, x.device, x.dtype).T, dim)


def group_size(n: int) -> int:
    """Return the largest of 128, 64, 32 and 16 that divides n rounded up to a multiple of 16."""
    blocks = (n + SIZE - 1) // SIZE
    # Divisions rather than bit operations: n may be a symbol of torch.compile.
    return next((size for size in (128, 64, 32) if blocks % (size // SIZE) == 0), SIZE)


def rotate_groups(x: Tensor, signs: Tensor, *, dim: int) -> Tensor:
    """Return H D x for every group along `dim` of x, zero-padded to whole groups.

    Args:
        x: fp32 or fp64.
        signs: +-1 [group], the diagonal of D; see `group_size`.
        dim: the dimension of the groups.
    """
    return _apply(x, _plain_matrix(len(signs), x.device, x.dtype) * signs.to(x.dtype), dim)


def unrotate_groups(x: Tensor, signs: Tensor, *, dim: int) -> Tensor:
    """Invert `rotate_groups` but keep the padding."""
    signs = signs.to(x.dtype)[:, None]
    return _apply(x, _plain_matrix(len(signs), x.device, x.dtype) * signs, dim)


def padded_shape(shape: tuple[int, int], *, dim: int) -> tuple[int, int]:
    """Return the shape [t c] with its dimension `dim` rounded up to a multiple of 16."""
    rows, columns = shape
    missing = -shape[dim] % SIZE
    return (rows, columns + missing) if dim % 2 else (rows + missing, columns)
