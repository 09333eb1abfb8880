"""Sums of rows with random signs in one launch, on CUDA devices; see `spectral.sum_rows`.

As torch operations they take twenty launches and a gather that reads at a tenth of the memory
bandwidth. Rows and signs are the same; sums differ in their last bits, because they are added in
another order.

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.kernels.scratch import Measured, zero_of
from metis_hf.numerics.kernels.triton_basis import finite_bits
from metis_hf.numerics.kernels.triton_direct import cdiv, launch
from metis_hf.numerics.kernels.triton_numbers import MAGNITUDE, bits_of, cast
from metis_hf.numerics.kernels.triton_numbers import uniform as uniform_at

_COLUMNS = 128  # columns per program
_ROWS = 16  # rows that it reads at once
_LANES = tl.constexpr(noise._LANES)


@triton.jit(do_not_specialize=["shift0", "shift1", "sign0", "sign1", "rows", "sums", "stretches"])
def add_rows(
    x_ptr, mask_ptr, out_ptr, largest_ptr, data_ptr, shift0, shift1, sign0, sign1, rows, columns,
    sums, stretches, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write one sum, of one row from each stretch of `sums` rows, with random signs.

    The largest finite magnitude of all sums goes, as bits, into the int32 at `largest_ptr`.
    """
    place = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, stretches, ROWS):
        stretch = begin + tl.arange(0, ROWS)[:, None]
        block, lane = stretch // _LANES, stretch % _LANES
        shift = (uniform_at(block, lane, (data_ptr, shift0, shift1)) * sums).to(tl.int32)
        row = (place + shift) % sums + stretch * sums
        taken = (stretch < stretches) & (row < rows)
        if mask_ptr is not None:
            taken = taken & (tl.load(mask_ptr + row, mask=taken, other=0) != 0)
        at = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
        value = bits_of(tl.load(x_ptr + at, mask=taken & (column < columns), other=0.0))
        value = value.to(tl.float32, bitcast=True)
        block += place * tl.cdiv(stretches, _LANES)
        chance = uniform_at(block, lane, (data_ptr, sign0, sign1))
        total += tl.where(chance < 0.5, -value, value)
    sum_ = tl.sum(total, 0, keep_dims=True)
    at = place.to(tl.int64) * columns + column
    rounded = cast(sum_, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, rounded, mask=column < columns)
    largest = tl.max(finite_bits(bits_of(rounded)) & MAGNITUDE)  # zeros outside
    # Most of the many programs do not raise the maximum and skip the atomic.
    tl.atomic_max(largest_ptr, largest, mask=largest > tl.load(largest_ptr), sem="relaxed")


def sum_rows(
    x: Tensor, sums: int, stretches: int, shifts: noise.Key, signs: noise.Key, mask: Tensor | None
) -> Tensor:
    """Add the rows of a matrix into `sums` sums of up to `stretches` rows each.

    Args:
        x: [t c], of a dtype that kernels read; t <= sums * stretches.
        sums, stretches: n and g.
        shifts, signs: noise keys of the stretches' shifts [g] and the rows' signs [n g].
        mask: [t] bool, which rows count; None: all.

    Returns:
        [n c] in the dtype of `x`; fp32 for fp16, whose range the sums may exceed.
    """
    columns = x.shape[1]
    dtype = torch.float32 if x.dtype is torch.float16 else x.dtype
    out = torch.empty(sums, columns, dtype=dtype, device=x.device)
    shift0, shift1 = noise.static_words(shifts)
    sign0, sign1 = noise.static_words(signs)
    largest = zero_of(signs.scratch, x.device)
    if signs.scratch is not None:
        signs.scratch.keep(Measured(out, finite=True), largest)
    launch(
        add_rows,
        (sums, cdiv(columns, _COLUMNS)),
        {"enable_fp_fusion": False},
        x_ptr=x,
        mask_ptr=None if mask is None else mask.view(torch.uint8),
        out_ptr=out,
        largest_ptr=largest,
        data_ptr=signs.data,
        shift0=shift0,
        shift1=shift1,
        sign0=sign0,
        sign1=sign1,
        rows=x.shape[0],
        columns=columns,
        sums=sums,
        stretches=stretches,
        row_stride=x.stride(0),
        column_stride=x.stride(1),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    return out
