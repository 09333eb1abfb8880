"""Orthonormal rows, and eigenvectors of small matrices, without waiting for the device.

Householder QR and `eigh` read a status back from CUDA devices. Here are a fixed number of products
and Cholesky factorizations, the same on every device. Gram matrices, and all that is small, are
fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.linalg import cholesky_ex, solve_triangular, vector_norm

from metis_hf.numerics.kernels.choice import kernels_for

# Share by which the diagonal of a Gram matrix grows: more than rounding takes off its smallest
# eigenvalue, so that it has a Cholesky factor.
_SHIFT = 2.0**-40
# Share of the old basis in the next one. Above the rounding errors of the dtype, and squared, as in
# a Gram matrix, above the errors of fp64.
_TRACE = {torch.float32: 2.0**-20, torch.float64: 2.0**-26}
_ZERO = 1e-18  # length of a row that counts as 0: the squares of its entries leave fp32
# Difference of eigenvalues, in units of their sum, below which they count as equal.
_TIE = 2.0**-40
_LARGEST_TANGENT = 0.5
_WIDEST_BLOCK = 128  # rows, whose Gram matrix one program of a GPU holds


def next_basis(y: Tensor, basis: Tensor | None = None, *, passes: int = 1) -> Tensor:
    """Return a nearly orthonormal basis [w c] of the rows of y = basis @ (some matrix).

    Each of its rows is made of those of y up to it. Rows by which y falls short of full rank are
    filled up from the basis before.

    Args:
        y: [w c], w <= c, fp32 or fp64.
        basis: [w c], of independent rows of about unit length; None: rows of the identity.
        passes: of `gram_factor`; after two the rows are orthonormal.
    """
    if len(y) <= _WIDEST_BLOCK and y.dtype is torch.float32 and kernels_for(y) == "triton":
        from metis_hf.numerics.kernels import triton_basis

        return triton_basis.next_basis(y, basis, passes, _TRACE[y.dtype], _ZERO, _SHIFT)
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


def eigenvectors(matrix: Tensor, rotations: int) -> Tensor:
    """Return the eigenvectors of a positive semidefinite matrix, by decreasing eigenvalue.

    A step of orthogonal iteration separates what is far apart. Jacobi's rotations of all pairs of
    vectors at once then converge quadratically (as the refinement by Ogita and Aishima does, Japan
    J. Indust. Appl. Math. 35, 1007, 2018).

    Args:
        matrix: [w w] fp64, w up to a hundred or so.
        rotations: how many times all pairs are rotated. After a few, vectors of nearly equal
            eigenvalues are still mixed.

    Returns:
        [w w] fp64, a vector in each row; orthonormal, whatever the matrix.
    """
    width = len(matrix)
    options: dict[str, Any] = {"dtype": matrix.dtype, "device": matrix.device}
    vectors = next_basis(matrix)
    tie = matrix.diagonal().sum().clamp_min_(_ZERO) * _TIE
    ramp = torch.arange(width, **options).mul_(tie)
    for _ in range(rotations):
        similar = vectors @ matrix @ vectors.T
        values = similar.diagonal() - ramp
        # Tangents of Jacobi's angles, to first order. Tangents of close pairs are too large, and a
        # smaller bound than their 1 converges faster where there are many.
        turn = similar.div_(values[:, None] - values).clamp_(-_LARGEST_TANGENT, _LARGEST_TANGENT)
        turned = turn.fill_diagonal_(1) @ vectors
        factor = cholesky_ex(turned @ turned.T).L
        vectors = solve_triangular(factor, turned, upper=False)
    values = (vectors @ matrix).mul_(vectors).sum(1)
    return vectors.index_select(0, values.argsort(descending=True, stable=True))
