"""Factors and eigenvectors of small matrices in one launch each, for CUDA devices.

A library takes some ten launches for a Cholesky factor and a triangular solve, and a range finder
has ten of both for each matrix. Here one program holds the matrix, fp64, up to `WIDEST` on a side.
The algorithms are those of `transforms.orthogonal`; results differ from a library's by rounding.

This module imports triton, so it is imported where it is used only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 64  # wider matrices do not fit into the registers of a program
_PER_WARP = 256  # elements
_NARROWEST = 16  # that `tl.dot` multiplies
_LEAST_PIVOT = tl.constexpr(1e-300)


@triton.jit
def _square(W: tl.constexpr):
    """Return row and column indices of a tile."""
    return tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]


@triton.jit
def _load(ptr, width, W: tl.constexpr):
    row, column = _square(W)
    inside = (row < width) & (column < width)
    return tl.load(ptr + row * width + column, mask=inside, other=0.0)


@triton.jit
def _times_transposed(a, b):
    """Return a @ b^T."""
    return tl.dot(a, tl.trans(b), out_dtype=tl.float64)


@triton.jit
def _divide_by_factor(gram, right, width, W: tl.constexpr):
    """Return L^-1 @ right, with L the Cholesky factor of `gram`, whose rows from `width` on are 0.

    Column by column: what has been divided so far is taken off the rows below.
    """
    row, column = _square(W)
    for j in range(width):
        # The matrix is symmetric: its column j is its row j.
        across = tl.sum(tl.where(row == j, gram, 0.0), 0, keep_dims=True)
        along = tl.sum(tl.where(column == j, gram, 0.0), 1, keep_dims=True)
        divided = tl.sum(tl.where(row == j, right, 0.0), 0, keep_dims=True)
        pivot = tl.sum(tl.where(column == j, across, 0.0), 1, keep_dims=True)
        length = tl.sqrt(tl.maximum(pivot, _LEAST_PIVOT))
        across, along, divided = across / length, along / length, divided / length
        gram -= along * across
        below = tl.where(row > j, along, 0.0)
        right = tl.where(row == j, divided, right - below * divided)
    return right


@triton.jit(do_not_specialize=["width"])
def invert_factor(gram_ptr, out_ptr, width, GROWTH: tl.constexpr, W: tl.constexpr):
    """Write L^-1, with L the Cholesky factor of a matrix whose diagonal grows by a share GROWTH."""
    row, column = _square(W)
    gram = _load(gram_ptr, width, W)
    gram = tl.where(row == column, gram * (1 + GROWTH), gram)
    inverse = _divide_by_factor(gram, tl.where(row == column, 1.0, gram * 0.0), width, W)
    inside = (row < width) & (column < width)
    tl.store(out_ptr + row * width + column, inverse, mask=inside)


@triton.jit(do_not_specialize=["width", "rotations"])
def find_eigenvectors(
    matrix_ptr,
    out_ptr,
    width,
    rotations,
    GROWTH: tl.constexpr,
    TRACE: tl.constexpr,
    LEAST: tl.constexpr,
    TIE: tl.constexpr,
    LARGEST: tl.constexpr,
    W: tl.constexpr,
):
    """Compute `transforms.orthogonal.eigenvectors`; its constants are in capitals."""
    row, column = _square(W)
    diagonal, inside = row == column, (row < width) & (column < width)
    matrix = _load(matrix_ptr, width, W)

    length = tl.sqrt(tl.sum(matrix * matrix, 1, keep_dims=True))
    start = matrix / tl.maximum(length, LEAST) + tl.where(diagonal & inside, TRACE, 0.0)
    gram = _times_transposed(start, start)
    gram = tl.where(diagonal, gram * (1 + GROWTH), gram)
    vectors = _divide_by_factor(gram, start, width, W)

    trace = tl.sum(tl.sum(tl.where(diagonal, matrix, 0.0), 1, keep_dims=True), 0, keep_dims=True)
    tie = tl.maximum(trace, LEAST) * TIE
    for _ in range(rotations):
        # V M V^T, of a symmetric M.
        matrix = _load(matrix_ptr, width, W)  # anew: it need not stay in registers
        similar = _times_transposed(vectors, _times_transposed(vectors, matrix))
        along = tl.sum(tl.where(diagonal, similar, 0.0), 1, keep_dims=True) - row * tie
        across = tl.sum(tl.where(diagonal, similar, 0.0), 0, keep_dims=True) - column * tie
        apart = tl.where(diagonal | (along == across), 1.0, along - across)
        turn = tl.minimum(tl.maximum(similar / apart, -LARGEST), LARGEST)
        turn = tl.where(diagonal, 1.0, tl.where(inside, turn, 0.0))
        turned = tl.dot(turn, vectors, out_dtype=tl.float64)
        vectors = _divide_by_factor(_times_transposed(turned, turned), turned, width, W)

    # By decreasing eigenvalue, equal ones in their order.
    products = _times_transposed(vectors, _load(matrix_ptr, width, W)) * vectors
    along = tl.sum(products, 1, keep_dims=True)
    across = tl.sum(tl.where(diagonal, along, 0.0), 0, keep_dims=True)
    before = (across > along) | ((across == along) & (column < row))
    place = tl.sum((before & (column < width)).to(tl.int32), 1, keep_dims=True)
    tl.store(out_ptr + place * width + column, vectors, mask=inside)


def inverse_factor(gram: Tensor, growth: float) -> Tensor:
    """Return L^-1 [w w], fp64: L the Cholesky factor of a matrix whose diagonal grows first.

    Args:
        gram: [w w] fp64, contiguous, w up to `WIDEST`.
        growth: share by which the diagonal grows.
    """
    out = torch.empty_like(gram)
    width = len(gram)
    with torch.cuda.device_of(gram):
        invert_factor[(1,)](gram, out, width, GROWTH=growth, **_size(width))
    return out


def eigenvectors(
    matrix: Tensor,
    rotations: int,
    *,
    growth: float,
    trace: float,
    least: float,
    tie: float,
    largest: float,
) -> Tensor:
    """See `transforms.orthogonal.eigenvectors`, whose constants it is given.

    Args:
        matrix: [w w] fp64, contiguous, w up to `WIDEST`.
    """
    out = torch.empty_like(matrix)
    width = len(matrix)
    with torch.cuda.device_of(matrix):
        find_eigenvectors[(1,)](
            matrix,
            out,
            width,
            rotations,
            GROWTH=growth,
            TRACE=trace,
            LEAST=least,
            TIE=tie,
            LARGEST=largest,
            **_size(width),
        )
    return out


def _size(width: int) -> dict[str, int]:
    tile = max(_NARROWEST, triton.next_power_of_2(width))
    return {"W": tile, "num_warps": max(1, tile * tile // _PER_WARP)}
