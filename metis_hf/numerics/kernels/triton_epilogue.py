"""The epilogue of a GEMM and the error of `epilogue`, in one launch each, on CUDA devices.

They equal the torch operations bit for bit, except that products are summed in another order.

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf.numerics.kernels.scratch import Measured, Scratch, zero_of
from metis_hf.numerics.kernels.triton_direct import cdiv, launch, padded_block
from metis_hf.numerics.kernels.triton_numbers import MAGNITUDE, bits_of, cast, multiply_add

_ROWS, _COLUMNS = 32, 128  # of a program's tile in `finish`
_LOST_ROWS = 32  # rows per program of `find_error`
_DEPTH = 128  # columns that it reads at once
_WIDEST = 64  # most columns of a term's factor, or directions, that a program holds at once
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _fp32(x):
    return bits_of(x).to(tl.float32, bitcast=True)


@triton.jit
def _load(ptr, row, column, rows, columns, row_stride, column_stride):
    """Load a tile of a matrix, zeros outside."""
    at = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    return tl.load(ptr + at, mask=(row < rows) & (column < columns), other=0.0)


@triton.jit(do_not_specialize=["rows"])
def finish(
    out_ptr, first_ptr, second_ptr, bias_ptr, left_ptr, right_ptr, rows, columns, width,
    left_row_stride, left_column_stride, right_row_stride, right_column_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply a matrix by scales, add left [rows width] @ right [width columns] and a bias.

    Works in place. FIRST and SECOND say what has one scale each: "rows", "columns" or the "matrix".
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    across = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    value = _fp32(tl.load(out_ptr + at, mask=inside, other=0.0))
    if first_ptr is not None:
        scale = _scale(first_ptr, row, column, rows, columns, FIRST)
        if second_ptr is not None:
            scale = scale * _scale(second_ptr, row, column, rows, columns, SECOND)
        value = _fp32(cast(value * scale, dtype))
    if left_ptr is not None:
        term = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, width, DEPTH):
            k = begin + tl.arange(0, DEPTH)
            left_strides = left_row_stride, left_column_stride
            left = _load(left_ptr, row, k[None, :], rows, width, *left_strides)
            right_strides = right_row_stride, right_column_stride
            right = _load(right_ptr, k[:, None], column, width, columns, *right_strides)
            term = multiply_add(term, left, right)
        value = _fp32(cast(value + term, dtype))
    if bias_ptr is not None:
        bias = _fp32(tl.load(bias_ptr + column, mask=column < columns, other=0.0))
        value = value + _fp32(cast(bias, dtype))
    tl.store(out_ptr + at, cast(value, dtype), mask=inside)


@triton.jit
def find_error(
    x_ptr, values_ptr, scale_ptr, directions_ptr, lengths_ptr, out_ptr, amax_ptr, rows, columns,
    width, row_stride, column_stride, values_row_stride, values_column_stride,
    directions_row_stride, directions_column_stride,
    SCALE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write ((x - values * scale) @ directions) * lengths, and the largest magnitude, as bits."""
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for begin in range(0, columns, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        along, down = k[None, :], k[:, None]
        strides = values_row_stride, values_column_stride
        value = _fp32(_load(values_ptr, row, along, rows, columns, *strides))
        if scale_ptr is not None:
            value = value * _scale(scale_ptr, row, along, rows, columns, SCALE)
        x = _fp32(_load(x_ptr, row, along, rows, columns, row_stride, column_stride))
        strides = directions_row_stride, directions_column_stride
        directions = _load(directions_ptr, down, column, columns, width, *strides)
        total = multiply_add(total, cast(x - value, dtype), directions)
    lengths = tl.load(lengths_ptr + column, mask=column < width, other=0.0)
    total = _fp32(cast(total, dtype)) * lengths
    at = row.to(tl.int64) * width + column
    inside = (row < rows) & (column < width)
    tl.store(out_ptr + at, total, mask=inside)
    # A product with zeros outside can be NaN: inf * 0.
    bits = tl.where(inside, bits_of(total) & MAGNITUDE, 0)
    tl.atomic_max(amax_ptr, tl.max(bits), sem="relaxed")


@triton.jit
def _scale(ptr, row, column, rows, columns, OF: tl.constexpr):
    if OF == "rows":
        scale = tl.load(ptr + row, mask=row < rows, other=0.0)
    elif OF == "columns":
        scale = tl.load(ptr + column, mask=column < columns, other=0.0)
    else:
        scale = tl.load(ptr)
    return scale


def finish_product(
    out: Tensor,
    scales: Sequence[Tensor],
    bias: Tensor | None,
    term: tuple[Tensor, Tensor] | None = None,
) -> None:
    """See `epilogue.finish_product`; `out` is a contiguous matrix, not empty."""
    first, second = (*scales, None, None)[:2]
    (rows, columns), (left, right) = out.shape, term or (None, None)
    width = 0 if left is None else left.shape[1]
    launch(
        finish,
        (cdiv(rows, _ROWS) * cdiv(columns, _COLUMNS),),
        _OPTIONS,
        out_ptr=out,
        first_ptr=None if first is None else first.contiguous(),
        second_ptr=None if second is None else second.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        left_ptr=left,
        right_ptr=right,
        rows=rows,
        columns=columns,
        width=width,
        left_row_stride=0 if left is None else left.stride(0),
        left_column_stride=0 if left is None else left.stride(1),
        right_row_stride=0 if right is None else right.stride(0),
        right_column_stride=0 if right is None else right.stride(1),
        FIRST=_kind(first),
        SECOND=_kind(second),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=min(_WIDEST, padded_block(width)),
    )


def error_along(
    x: Tensor,
    values: Tensor,
    scale: Tensor | None,
    directions: Tensor,
    lengths: Tensor,
    scratch: Scratch | None,
) -> Tensor:
    """See `epilogue.error_along`; no tensor is empty."""
    (rows, columns), width = values.shape, len(lengths)
    out = torch.empty(rows, width, dtype=torch.float32, device=values.device)
    amax = zero_of(scratch, values.device)
    if scratch is not None:
        scratch.keep(Measured(out), amax)
    block = min(_WIDEST, padded_block(width))
    launch(
        find_error,
        (cdiv(rows, _LOST_ROWS), cdiv(width, block)),
        _OPTIONS,
        x_ptr=x,
        values_ptr=values,
        scale_ptr=None if scale is None else scale.contiguous(),
        directions_ptr=directions,
        lengths_ptr=lengths.contiguous(),
        out_ptr=out,
        amax_ptr=amax,
        rows=rows,
        columns=columns,
        width=width,
        row_stride=x.stride(0),
        column_stride=x.stride(1),
        values_row_stride=values.stride(0),
        values_column_stride=values.stride(1),
        directions_row_stride=directions.stride(0),
        directions_column_stride=directions.stride(1),
        SCALE=_kind(scale),
        ROWS=_LOST_ROWS,
        WIDTH=block,
        DEPTH=_DEPTH,
    )
    return out


def _kind(scale: Tensor | None) -> str:
    if scale is None or scale.numel() == 1:
        return "matrix"
    return "rows" if scale.shape[-1] == 1 else "columns"
