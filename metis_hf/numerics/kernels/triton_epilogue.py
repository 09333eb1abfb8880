"""The epilogue of a GEMM in one launch, for CUDA devices; see `epilogue`.

This module imports triton, so it is imported where it is used only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf.numerics.kernels.scratch import Measured, Scratch, zero_of
from metis_hf.numerics.kernels.triton_direct import cdiv, launch
from metis_hf.numerics.kernels.triton_numbers import MAGNITUDE, bits_of, cast

_TILE = 4096  # elements of a program
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _fp32(x):
    return bits_of(x).to(tl.float32, bitcast=True)


@triton.jit
def finish(
    out_ptr, first_ptr, second_ptr, bias_ptr, count, columns,
    FIRST: tl.constexpr, SECOND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply `count` elements, in rows of `columns`, by scales and add a bias; in place.

    FIRST and SECOND say what a scale is one of: "rows", "columns" or the "matrix".
    """
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    row, column = at // columns, at % columns
    value = _fp32(tl.load(out_ptr + at, mask=inside, other=0.0))
    if first_ptr is not None:
        scale = _scale(first_ptr, row, column, inside, FIRST)
        if second_ptr is not None:
            scale = scale * _scale(second_ptr, row, column, inside, SECOND)
        value = value * scale
    if bias_ptr is not None:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        bias = _fp32(tl.load(bias_ptr + column, mask=inside, other=0.0))
        if first_ptr is not None:
            value = _fp32(cast(value, dtype))
        value = value + _fp32(cast(bias, dtype))
    tl.store(out_ptr + at, cast(value, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def subtract(
    x_ptr, values_ptr, scale_ptr, out_ptr, count, columns, row_stride, column_stride,
    SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write x - values * scale for `count` elements, in rows of `columns`."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    row, column = at // columns, at % columns
    value = _fp32(tl.load(values_ptr + at, mask=inside, other=0.0))
    if scale_ptr is not None:
        value = value * _scale(scale_ptr, row, column, inside, SCALE)
    place = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    error = _fp32(tl.load(x_ptr + place, mask=inside, other=0.0)) - value
    tl.store(out_ptr + at, cast(error, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_columns(x_ptr, lengths_ptr, out_ptr, amax_ptr, count, columns, TILE: tl.constexpr):
    """Write x times the lengths of its columns, and the largest magnitude, as bits."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    value = _fp32(tl.load(x_ptr + at, mask=inside, other=0.0))
    value = value * tl.load(lengths_ptr + at % columns, mask=inside, other=0.0)
    tl.store(out_ptr + at, value, mask=inside)
    tl.atomic_max(amax_ptr, tl.max(bits_of(value) & MAGNITUDE), sem="relaxed")


@triton.jit
def _scale(ptr, row, column, inside, OF: tl.constexpr):
    if OF == "rows":
        scale = tl.load(ptr + row, mask=inside, other=0.0)
    elif OF == "columns":
        scale = tl.load(ptr + column, mask=inside, other=0.0)
    else:
        scale = tl.load(ptr)
    return scale


def finish_product(out: Tensor, scales: Sequence[Tensor], bias: Tensor | None) -> None:
    """See `epilogue.finish_product`; `out` is a contiguous matrix, not empty."""
    first, second = (*scales, None, None)[:2]
    count, columns = out.numel(), out.shape[1]
    launch(
        finish,
        (cdiv(count, _TILE),),
        _OPTIONS,
        out_ptr=out,
        first_ptr=None if first is None else first.contiguous(),
        second_ptr=None if second is None else second.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        count=count,
        columns=columns,
        FIRST=_kind(first),
        SECOND=_kind(second),
        TILE=_TILE,
    )


def rounding_error(x: Tensor, values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `epilogue.rounding_error`; `values` is a contiguous matrix, not empty."""
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    count, columns = out.numel(), out.shape[1]
    launch(
        subtract,
        (cdiv(count, _TILE),),
        _OPTIONS,
        x_ptr=x,
        values_ptr=values,
        scale_ptr=None if scale is None else scale.contiguous(),
        out_ptr=out,
        count=count,
        columns=columns,
        row_stride=x.stride(0),
        column_stride=x.stride(1),
        SCALE=_kind(scale),
        TILE=_TILE,
    )
    return out


def multiply_columns(x: Tensor, lengths: Tensor, scratch: Scratch | None) -> Tensor:
    """See `epilogue.multiply_columns`; x is a contiguous matrix, not empty."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    amax = zero_of(scratch, x.device)
    if scratch is not None:
        scratch.keep(Measured(out), amax)
    launch(
        scale_columns,
        (cdiv(out.numel(), _TILE),),
        _OPTIONS,
        x_ptr=x,
        lengths_ptr=lengths.contiguous(),
        out_ptr=out,
        amax_ptr=amax,
        count=out.numel(),
        columns=out.shape[1],
        TILE=_TILE,
    )
    return out


def _kind(scale: Tensor | None) -> str:
    if scale is None or scale.numel() == 1:
        return "matrix"
    return "rows" if scale.shape[-1] == 1 else "columns"
