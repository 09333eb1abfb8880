"""Hadamard rotation of groups of up to 128 entries, with signs that the caller gives.

Of the groups that whole blocks of 16 can be cut into, the largest; as MS-EDEN wants it (arXiv
2601.22813).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.noise import constant
from metis_hf.transforms.hadamard import SIZE
from metis_hf.transforms.rotation import sylvester


def group_size(n: int) -> int:
    """Return how many of n entries, zero-padded to blocks of 16, are rotated together."""
    blocks = (n + SIZE - 1) // SIZE
    # Tests rather than bit operations: torch.compile knows n as a symbol.
    return next((size for size in (128, 64, 32) if blocks % (size // SIZE) == 0), SIZE)


def rotate_groups(x: Tensor, signs: Tensor, *, dim: int) -> Tensor:
    """Return H D x for every group along `dim` of x [t c], zero-padded to blocks.

    Args:
        x: fp32 or fp64.
        signs: +-1 [group], the diagonal of D; `group_size` says how many.
        dim: the dimension of the groups.
    """
    missing = -x.shape[dim] % SIZE
    if missing:
        x = F.pad(x, (0, missing) if dim % 2 else (0, 0, 0, missing))
    return _by_group(x, _hadamard_like(len(signs), x) * signs.to(x.dtype), dim)


def unrotate_groups(x: Tensor, signs: Tensor, *, dim: int) -> Tensor:
    """Invert `rotate_groups`, padding included."""
    return _by_group(x, _hadamard_like(len(signs), x) * signs.to(x.dtype)[:, None], dim)


def _by_group(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """Return matrix [group group] times every group along `dim` of x [t c]."""
    if dim % 2:
        return (x.reshape(-1, len(matrix)) @ matrix.T).view(x.shape)
    return (matrix @ x.reshape(-1, len(matrix), x.shape[1])).flatten(0, 1)


@constant
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return sylvester(size, dtype, device)


def _hadamard_like(size: int, x: Tensor) -> Tensor:
    return _hadamard(size, x.dtype, x.device)
