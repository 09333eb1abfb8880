"""Orthonormal bases of a few rows in few launches, for CUDA devices; see `transforms.orthogonal`.

Products are GEMMs of torch. Around each, one launch makes rows of unit length, and one program of a
single block turns their Gram matrix into the inverse of its Cholesky factor: the solvers of CUDA's
libraries take several kernels for a factor, and one more for each use of it.

This module imports triton, so it is imported where it is used only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf.numerics.kernels.layout import readable
from metis_hf.numerics.kernels.triton_direct import launch
from metis_hf.numerics.kernels.triton_numbers import bits_of

_TILE = 4096  # elements of a program that looks for the largest one, or scales
_PARTS = 1024  # of which a program reads the largest elements at once
_COLUMNS = 1024  # of a row at once
_OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _finite(x_ptr, at, count):
    """Read numbers as fp32, those as 0 that are not finite."""
    bits = bits_of(tl.load(x_ptr + at, mask=at < count, other=0.0))
    value = bits.to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, 0.0, value)


@triton.jit(do_not_specialize=["count"])
def find_largest(x_ptr, out_ptr, count, TILE: tl.constexpr):
    """Write the largest finite magnitude of the program's elements."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + tl.program_id(0), tl.max(tl.abs(_finite(x_ptr, at, count))))


@triton.jit(do_not_specialize=["count", "parts"])
def scale(
    x_ptr, largest_ptr, out_ptr, count, parts, TINY: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Write the finite numbers over the largest of some magnitudes."""
    largest = tl.full((PARTS,), TINY, tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        largest = tl.maximum(largest, tl.load(largest_ptr + part, mask=part < parts, other=0.0))
    unit = tl.max(largest)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = _finite(x_ptr, at, count)
    tl.store(out_ptr + at, tl.math.div_rn(value, unit + tl.zeros_like(value)), mask=at < count)


def in_range(sample: Tensor) -> Tensor:
    """Return a matrix in fp32, its largest entry 1, and 0 where it is not finite."""
    sample = readable(sample).contiguous()
    count = sample.numel()
    programs = triton.cdiv(count, _TILE)
    out = torch.empty(sample.shape, dtype=torch.float32, device=sample.device)
    largest = torch.empty(programs, dtype=torch.float32, device=sample.device)
    with torch.cuda.device_of(sample):
        sizes = {"count": count, "TILE": _TILE}
        launch(find_largest, (programs,), _OPTIONS, x_ptr=sample, out_ptr=largest, **sizes)
        launch(
            scale,
            (programs,),
            _OPTIONS,
            x_ptr=sample,
            largest_ptr=largest,
            out_ptr=out,
            parts=programs,
            TINY=torch.finfo(torch.float32).tiny,
            PARTS=_PARTS,
            **sizes,
        )
    return out


@triton.jit
def unit_rows(
    y_ptr, basis_ptr, out_ptr, columns, TRACE: tl.constexpr, ZERO: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a row over its length plus a trace of another one, in fp64.

    The other is the row of `basis`, or of the identity.
    """
    row = tl.program_id(0)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        y = tl.load(y_ptr + row.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
        squares += y * y
    length = tl.maximum(tl.sqrt_rn(tl.sum(squares)), ZERO)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < columns
        at = row.to(tl.int64) * columns + column
        y = tl.load(y_ptr + at, mask=inside, other=0.0)
        y = tl.math.div_rn(y, length + tl.zeros_like(y))
        if basis_ptr is None:
            y += tl.where(column == row, TRACE, 0.0)
        else:
            y += tl.load(basis_ptr + at, mask=inside, other=0.0) * TRACE
        tl.store(out_ptr + at, y.to(tl.float64), mask=inside)


@triton.jit(do_not_specialize=["width"])
def invert_factor(gram_ptr, out_ptr, width, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Write L^-1, where L L^T is a matrix [width width] with a diagonal a little larger.

    Elimination in place: before step j the columns up to j - 1 hold the inverse of the factor of
    the leading rows, and the others what is left of the matrix, which stays symmetric. Each step
    subtracts the product of the column j, below the diagonal, and the row j.
    """
    row = tl.arange(0, WIDTH)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < width) & (column < width)
    left = tl.load(gram_ptr + row * width + column, mask=inside, other=0.0)
    left += tl.where(row == column, left * SHIFT, 0.0)
    for j in range(0, width):
        of_row = tl.sum(tl.where(row == j, left, 0.0), 0, keep_dims=True)
        root = 1.0 / tl.sqrt(tl.sum(tl.where(column == j, of_row, 0.0), 1, keep_dims=True))
        of_row *= root
        of_column = tl.trans(of_row)
        of_row = tl.where(column == j, root, of_row)
        rest = tl.where(column == j, 0.0, left) - of_column * of_row
        left = tl.where(row > j, rest, tl.where(row == j, of_row, left))
    tl.store(out_ptr + row * width + column, tl.where(column <= row, left, 0.0), mask=inside)


def _orthonormal(y: Tensor, shift: float) -> Tensor:
    """Make rows of y [w c] in fp64 nearly orthonormal.

    A product with the inverse, unlike a solve row after row, carries errors of nearly dependent
    rows over to others: hence fp64, in which they are none.
    """
    gram = y @ y.T
    inverse = torch.empty_like(gram)
    width = len(gram)
    padded = max(16, triton.next_power_of_2(width))
    options = {"num_warps": max(1, min(16, padded * padded // 512))}  # 8 to 32 numbers of a thread
    sizes = {"width": width, "SHIFT": shift, "WIDTH": padded}
    with torch.cuda.device_of(y):
        launch(invert_factor, (1,), options, gram_ptr=gram, out_ptr=inverse, **sizes)
    return inverse @ y


def next_basis(
    y: Tensor, basis: Tensor | None, passes: int, trace: float, zero: float, shift: float
) -> Tensor:
    """See `orthogonal.next_basis`; fp32."""
    y = y.contiguous()
    out = torch.empty_like(y, dtype=torch.float64)
    with torch.cuda.device_of(y):
        launch(
            unit_rows,
            (len(y),),
            _OPTIONS,
            y_ptr=y,
            basis_ptr=None if basis is None else basis.contiguous(),
            out_ptr=out,
            columns=y.shape[1],
            TRACE=trace,
            ZERO=zero,
            COLUMNS=_COLUMNS,
        )
    for _ in range(passes):
        out = _orthonormal(out, shift)
    return out.float()
