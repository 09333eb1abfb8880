"""The projection of a tall matrix onto a thin basis, on CUDA devices; see `transforms.products`.

As torch operations it takes twenty launches around one GEMM. Here one launch multiplies, and one
normalizes the columns. Sums have a fixed order, so equal matrices give equal bits; the bits differ
from the torch operations.

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf.numerics.kernels.scratch import Measured, Scratch, zero_of
from metis_hf.numerics.kernels.triton_direct import cdiv, launch, padded_block
from metis_hf.numerics.kernels.triton_numbers import MAGNITUDE, add_product

_ROWS = 64  # rows per program
_COLUMNS = 16  # columns per program of `to_unit_columns`
_BLOCKS = 128  # programs of `multiply` whose sums of squares are added up at once
_OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _divide(a, b):
    """Divide a matrix by a row."""
    return tl.math.div_rn(a, b + tl.zeros_like(a))


@triton.jit(do_not_specialize=["count"])
def multiply(
    x_ptr, v_ptr, out_ptr, largest_ptr, squares_ptr, count, columns, width,
    row_stride, column_stride, v_row_stride, v_column_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write x [count columns] @ v [columns width], and largest magnitudes and sums of squares.

    x is bf16, and v is split into a sum of three bf16 matrices: tensor cores multiply and
    accumulate in fp32. Each program writes the magnitude and the sum for each column of its rows;
    the sum is in units of the squared magnitude, so that it stays in the fp32 range.
    """
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for begin in range(0, columns, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        at = row.to(tl.int64) * row_stride + k[None, :].to(tl.int64) * column_stride
        x = tl.load(x_ptr + at, mask=(row < count) & (k[None, :] < columns), other=0.0)
        at = k[:, None].to(tl.int64) * v_row_stride + column.to(tl.int64) * v_column_stride
        v = tl.load(v_ptr + at, mask=(k[:, None] < columns) & (column < width), other=0.0)
        total = add_product(total, x, v, False)
    inside = (row < count) & (column < width)
    tl.store(out_ptr + row.to(tl.int64) * width + column, total, mask=inside)
    largest = tl.max(tl.abs(total), 0, keep_dims=True)
    scaled = _divide(total, tl.where(largest == 0, 1.0, largest))
    squares = tl.sum(scaled * scaled, 0, keep_dims=True)  # NaN if there is one
    of_block = block * width + column
    tl.store(largest_ptr + of_block, largest, mask=column < width)
    tl.store(squares_ptr + of_block, squares, mask=column < width)


@triton.jit(do_not_specialize=["count", "blocks"])
def to_unit_columns(
    out_ptr, largest_ptr, squares_ptr, lengths_ptr, amax_ptr, count, width, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Divide each column by its length, in place, and write the lengths and the largest magnitude.

    The largest magnitude goes, as bits, into the int32 at `amax_ptr`.
    """
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    largest = tl.zeros((1, COLUMNS), tl.float32)
    for begin in range(0, blocks, BLOCKS):
        other = begin + tl.arange(0, BLOCKS)[:, None]
        inside = (other < blocks) & (column < width)
        found = tl.load(largest_ptr + other * width + column, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(found, 0, keep_dims=True))
    unit = tl.where(largest == 0, 1.0, largest)
    squares = tl.zeros((1, COLUMNS), tl.float32)
    for begin in range(0, blocks, BLOCKS):
        other = begin + tl.arange(0, BLOCKS)[:, None]
        inside = (other < blocks) & (column < width)
        found = tl.load(largest_ptr + other * width + column, mask=inside, other=0.0)
        found = _divide(found, unit)
        share = tl.load(squares_ptr + other * width + column, mask=inside, other=0.0)
        squares += tl.sum(found * found * share, 0, keep_dims=True)
    length = tl.sqrt_rn(squares)
    if block == 0:
        tl.store(lengths_ptr + column, length * largest, mask=column < width)
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < count) & (column < width)
    at = row.to(tl.int64) * width + column
    value = _divide(tl.load(out_ptr + at, mask=inside, other=0.0), unit)
    # The length is at least 1 if the column is not zero; NaN stays NaN.
    value = _divide(value, tl.where(length < 1.0, 1.0, length))
    tl.store(out_ptr + at, value, mask=inside)
    bits = value.to(tl.int32, bitcast=True) & MAGNITUDE
    tl.atomic_max(amax_ptr, tl.max(tl.where(inside, bits, 0)), sem="relaxed")


def project(x: Tensor, v: Tensor, scratch: Scratch | None) -> tuple[Tensor, Tensor]:
    """Project x [t c], bf16, onto the basis v [c k], fp32: unit columns [t k] and lengths [k].

    The scratch memory of the layer's call caches the largest magnitude of the unit columns.
    """
    (count, columns), width = x.shape, v.shape[1]
    blocks, padded = cdiv(count, _ROWS), padded_block(width)
    out = torch.empty(count, width, dtype=torch.float32, device=x.device)
    lengths = torch.empty(width, dtype=torch.float32, device=x.device)
    largest, squares = torch.empty(2, blocks, width, dtype=torch.float32, device=x.device)
    amax = zero_of(scratch, x.device)
    if scratch is not None:
        scratch.keep(Measured(out), amax)
    known = {"out_ptr": out, "largest_ptr": largest, "squares_ptr": squares}
    launch(
        multiply,
        (blocks,),
        _OPTIONS,
        x_ptr=x,
        v_ptr=v,
        **known,
        count=count,
        columns=columns,
        width=width,
        row_stride=x.stride(0),
        column_stride=x.stride(1),
        v_row_stride=v.stride(0),
        v_column_stride=v.stride(1),
        ROWS=_ROWS,
        WIDTH=padded,
        DEPTH=64 if padded <= 64 else 32,
    )
    launch(
        to_unit_columns,
        (blocks, cdiv(width, _COLUMNS)),
        _OPTIONS,
        **known,
        lengths_ptr=lengths,
        amax_ptr=amax,
        count=count,
        width=width,
        blocks=blocks,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        BLOCKS=_BLOCKS,
    )
    return out, lengths
