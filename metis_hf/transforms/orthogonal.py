"""Orthonormal rows without waiting for the device.

Householder QR reads a status back from CUDA devices. Here are a fixed number of products
and Cholesky factorizations, the same on every device. Gram matrices, and all that is small, are
fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import cholesky_ex, solve_triangular, vector_norm

# Share by which the diagonal of a Gram matrix grows: more than rounding takes off its smallest
# eigenvalue, so that it has a Cholesky factor.
_SHIFT = 2.0**-40
# Share of the old basis in the next one. Above the rounding errors of the dtype, and squared, as in
# a Gram matrix, above the errors of fp64.
_TRACE = {torch.float32: 2.0**-20, torch.float64: 2.0**-26}
_ZERO = 1e-18  # length of a row that counts as 0: the squares of its entries leave fp32
LIMITS = _TRACE[torch.float32], _ZERO, _SHIFT  # for kernels
WIDEST_BLOCK = 128  # rows, whose Gram matrix one program of a GPU holds


def next_basis(y: Tensor, basis: Tensor | None = None, *, passes: int = 1) -> Tensor:
    """Return a nearly orthonormal basis [w c] of the rows of y = basis @ (some matrix).

    Row i lies in the span of the first i rows of y, as after Gram and Schmidt. Rows by which y
    falls short of full rank are filled up from the basis before.

    Args:
        y: [w c], w <= c, fp32 or fp64.
        basis: [w c], of independent rows of about unit length; None: rows of the identity.
        passes: of `gram_factor`; after two the rows are orthonormal.
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

    A pass of shifted Cholesky QR (Fukaya et al., SIAM J. Sci. Comput. 42, A477, 2020), with its
    Gram matrix in fp64 (Yamazaki, Tomov, Dongarra, SIAM J. Sci. Comput. 37, C307, 2015). Off
    orthonormality by the condition of y times the rounding error of its dtype; a second pass takes
    that away.
    """
    y = y.double()
    gram = y @ y.T
    gram.diagonal().mul_(1 + _SHIFT)
    return cholesky_ex(gram).L
