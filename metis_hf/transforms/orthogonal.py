"""Orthonormal rows without waiting for the device.

Householder QR reads a status back from CUDA devices. This module uses a fixed number of products
and Cholesky factorizations, the same on every device. Gram matrices and their factors are fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import cholesky_ex, solve_triangular, vector_norm

# Relative increase of the diagonal of a Gram matrix: more than rounding takes off the smallest
# eigenvalue, so that the matrix has a Cholesky factor.
_SHIFT = 2.0**-40
# Weight of the old basis in the next one. It exceeds the rounding errors of the dtype; its square,
# which enters the Gram matrix, exceeds the errors of fp64.
_TRACE = {torch.float32: 2.0**-20, torch.float64: 2.0**-26}
_ZERO = 1e-18  # shorter rows count as 0: the squares of their entries underflow fp32
LIMITS = _TRACE[torch.float32], _ZERO, _SHIFT  # for kernels
WIDEST_BLOCK = 128  # most rows whose Gram matrix one program of a GPU can hold


def next_basis(y: Tensor, basis: Tensor | None = None, *, passes: int = 1) -> Tensor:
    """Return a nearly orthonormal basis [w c] of the rows of y = basis @ (some matrix).

    Row i lies in the span of the first i rows of y, as in Gram-Schmidt. Where y lacks full rank,
    rows of the previous basis fill in.

    Args:
        y: [w c], w <= c, fp32 or fp64.
        basis: [w c], independent rows of about unit length; None takes rows of the identity.
        passes: number of passes of `gram_factor`; after two the rows are orthonormal.
    """
    y = y / vector_norm(y, dim=1, keepdim=True).clamp_min_(_ZERO)
    if basis is None:
        y.diagonal().add_(_TRACE[y.dtype])
    else:
        y.add_(basis, alpha=_TRACE[y.dtype])
    for _ in range(passes):
        y = solve_triangular(gram_factor(y).to(y.dtype), y, upper=False)
    return y


def gram_factor(y: Tensor) -> Tensor:
    """Return the Cholesky factor L [w w], fp64, of y y^T for y [w c]: L^-1 y has orthonormal rows.

    One pass of shifted Cholesky QR (Fukaya et al., SIAM J. Sci. Comput. 42, A477, 2020), with the
    Gram matrix in fp64 (Yamazaki, Tomov, Dongarra, SIAM J. Sci. Comput. 37, C307, 2015). The rows
    deviate from orthonormality by the condition number of y times the rounding error of its dtype;
    a second pass removes the deviation.
    """
    y = y.double()
    gram = y @ y.T
    gram.diagonal().mul_(1 + _SHIFT)
    return cholesky_ex(gram).L
