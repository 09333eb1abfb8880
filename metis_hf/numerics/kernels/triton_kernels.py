"""The quantizers as Triton kernels, for CUDA devices; on CPU through Triton's interpreter.

The same arithmetic as `numerics.definition`, to the bit: plus + Q(x - minus), or the codes and
scales of Q(x). What may not be left to a GPU's choice:

- Amax is taken of magnitudes as integers; see `triton_amax`.
- Clamps are comparisons, which leave NaN where it is. Division is IEEE's (`div_rn`).
- `floor` may flush subnormal numbers to zero; nothing here depends on which of the two it gives.
- E4M3 is fp32 arithmetic; no 8-bit cast of the hardware is used.
- Nothing is contracted into fused multiply-adds (`enable_fp_fusion=False`), though none would show.

A program works on a tile; see `triton_tiles`. With a SIZE the matrix is rotated first, in groups of
so many entries that lie along its blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metis_hf.numerics.kernels.triton_numbers import (
    LARGEST_FP32,
    MAGNITUDE,
    block_scales_of,
    cast,
    codes_of,
    e2m1_bits,
    e4m3_bits,
    outer_scale,
)
from metis_hf.numerics.kernels.triton_rotation import rotate, rotated
from metis_hf.numerics.kernels.triton_tiles import (
    inside_of,
    low_rank_of,
    packed_values,
    place_of_tile,
    read,
)


@triton.jit
def _outer_scale_of(
    amax_ptr, decode_ptr, block, blocks, per_row, LARGEST: tl.constexpr, BY_ROW: tl.constexpr
):
    """Return (encode, decode) scales of the tensor, or of the rows that `block` lies in.

    The program, or the block, that comes first writes the decode scale to `decode_ptr`.

    Args:
        amax_ptr: magnitudes that get LARGEST, as bits.
        decode_ptr: fp32, as many.
        block: numbers of row blocks, of which there are `blocks`, `per_row` in a row.
    """
    if BY_ROW:
        outer, inside = block // per_row, block < blocks
        encode, decode = outer_scale(tl.load(amax_ptr + outer, mask=inside, other=0), LARGEST)
        tl.store(decode_ptr + outer, decode, mask=inside & (block % per_row == 0))
    else:
        encode, decode = outer_scale(tl.load(amax_ptr), LARGEST)
        tl.store(decode_ptr, decode, mask=tl.program_id(0) == 0)
    return encode, decode


@triton.jit
def _store_codes(
    code, scale, place, rows, columns, codes_ptr, scale_ptr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    """Write codes, two to a byte along their blocks (square ones: along rows), and scales."""
    row_block, column_block, row, column = place
    across, down = tl.cdiv(columns, 16), tl.cdiv(rows, 16)
    GR: tl.constexpr = code.shape[0]
    GC: tl.constexpr = code.shape[2]
    pair = tl.arange(0, 8)
    if LANES:
        nibbles = e2m1_bits(code) << ((column % 2) * 4)
        packed = tl.sum(tl.reshape(nibbles, (GR, 16, GC, 8, 2)), 4)
        byte = (row.to(tl.int64) * across + column_block) * 8 + pair[None, None, None, :]
        inside = (row < rows) & (column_block < across)
    else:
        nibbles = e2m1_bits(code) << ((row % 2) * 4)
        packed = tl.sum(tl.reshape(nibbles, (GR, 8, 2, GC, 16)), 2)
        byte = (column.to(tl.int64) * down + row_block) * 8 + pair[None, :, None, None]
        inside = (column < columns) & (row_block < down)
    tl.store(codes_ptr + byte, packed.to(tl.uint8), mask=inside)
    if LANES and ROWS:
        at = row_block.to(tl.int64) * across + column_block
        inside = (row_block < down) & (column_block < across)
    elif LANES:
        at = row.to(tl.int64) * across + column_block
    else:
        at = column.to(tl.int64) * down + row_block
    tl.store(scale_ptr + at, e4m3_bits(scale).to(tl.uint8), mask=inside)


@triton.jit
def _store_packed(
    code, scale, place, rows, columns, codes_ptr, scale_ptr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    """Write codes and scales as `layout.Packed` has them; rows of row blocks are 1 or 2n blocks.

    The other element of a byte lies in the next row block, or half a block further down.
    """
    row_block, column_block, row, column = place
    GR: tl.constexpr = code.shape[0]
    GC: tl.constexpr = code.shape[2]
    bits = e2m1_bits(code)
    half = tl.arange(0, 8)[None, :, None, None]
    if LANES and not ROWS:
        across = tl.cdiv(columns, 16)
        block = row.to(tl.int64) * across + column_block
        low = bits << ((block.to(tl.int32) % 2) * 4)
        if GC == 1:
            packed = tl.sum(tl.reshape(low, (GR, 8, 2, GC, 16)), 2)
            byte = (row_block * 8 + half).to(tl.int64) * 16 + column
            inside = (row_block * 16 + half * 2 < rows) & (column < 16)
            rows += rows % 2  # a block of zeros after an odd number
        else:
            packed = tl.sum(tl.reshape(low, (GR, 16, GC // 2, 2, 16)), 3)
            first = (tl.program_id(0) % tl.cdiv(across, GC)) * (GC // 2)
            pair = first + tl.arange(0, GC // 2)[None, None, :, None]
            inside = (row < rows) & (pair < across // 2)
            pair = row.to(tl.int64) * (across // 2) + pair
            byte = pair * 16 + tl.arange(0, 16)[None, None, None, :]
        whole = (row < rows) & (column_block < across)
        tl.store(scale_ptr + block, e4m3_bits(scale).to(tl.uint8), mask=whole)
    else:
        packed = tl.sum(tl.reshape(bits << (((row % 16) // 8) * 4), (GR, 2, 8, GC, 16)), 1)
        byte = (row_block * 8 + half).to(tl.int64) * columns + column
        inside = (row_block * 16 < rows) & (column < columns)
        if LANES:
            at = row_block.to(tl.int64) * tl.cdiv(columns, 16) + column_block
            whole = (row_block * 16 < rows) & (column_block * 16 < columns)
        else:
            at = row_block.to(tl.int64) * columns + column
            whole = inside
        tl.store(scale_ptr + at, e4m3_bits(scale).to(tl.uint8), mask=whole)
    tl.store(codes_ptr + byte, packed.to(tl.uint8), mask=inside)


@triton.jit
def _finish(values, minus, plus_ptr, inside, at, SAME: tl.constexpr):
    """Add what is added: see `reference.add_back`."""
    if SAME or plus_ptr is not None:
        values = tl.where(values > LARGEST_FP32, LARGEST_FP32, values)
        added = minus
        if not SAME:
            added = tl.load(plus_ptr + at, mask=inside, other=0.0)
        values = values + added
    return values


@triton.jit
def _write(
    values, minus, plus_ptr, out_ptr, place, rows, columns, signs,
    SIZE: tl.constexpr, SIGNED: tl.constexpr, LANES: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """Write a tile's values, of groups rotated back: these reach to the end of the last blocks."""
    if SIZE:
        values = rotate(values, place, signs, SIZE, SIGNED, LANES, True)
        if not LANES:
            rows = tl.cdiv(rows, 16) * 16
    inside, at = inside_of(place, rows, columns)
    values = _finish(values, minus, plus_ptr, inside, at, SAME)
    tl.store(out_ptr + at, cast(values, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["rows", "width", "word0", "word1", "sign0", "sign1", "blocks", "per_row"]
)
def quantize(
    x_ptr, minus_ptr, plus_ptr, amax_ptr, decode_ptr, out_ptr, codes_ptr, scale_ptr, data_ptr,
    word0, word1, sign_ptr, sign0, sign1, blocks, per_row, rows, columns, row_stride, column_stride,
    left_ptr, left_scale_ptr, left_decode_ptr, lengths_ptr, right_ptr, right_scale_ptr,
    right_decode_ptr, width,
    GR: tl.constexpr, GC: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    TWO_LEVEL: tl.constexpr, UP: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr,
    SAME: tl.constexpr, PACKED: tl.constexpr, RULE: tl.constexpr, TO_CODE: tl.constexpr,
    LARGEST: tl.constexpr, BY_ROW: tl.constexpr, SIZE: tl.constexpr, SIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return plus + Q(x - minus) of a matrix, in blocks along LANES, ROWS or both.

    Values go to `out_ptr`, codes to `codes_ptr` and scales to `scale_ptr`, where there are such: as
    `Packed` has them with PACKED, else as files do. With SAME `minus` is what is added too. RULE is
    "", "search", "four-over-six" or "eden"; TO_CODE is 1 / the code that amax gets, LARGEST that
    code times the scale of the tensor's largest block. With BY_ROW rows have a scale each instead
    of the tensor: rows of `per_row` blocks, of a tensor with so many `blocks`. With a WIDTH both
    `minus` and what is added are a low-rank matrix, of rank `width`; see `layout.Low`.
    """
    place = place_of_tile(rows, columns, GR, GC)
    row_block, column_block, row, column = place
    low = (
        left_ptr, left_scale_ptr, left_decode_ptr, lengths_ptr,
        right_ptr, right_scale_ptr, right_decode_ptr, width,
    )  # fmt: skip
    strides = (row_stride, column_stride)
    bits, minus = read(x_ptr, minus_ptr, low, place, rows, columns, strides, LANES, WIDTH)
    signs = (sign_ptr, sign0, sign1)
    if SIZE:
        bits = rotated(bits, place, signs, SIZE, SIGNED, LANES)
    amax = bits & MAGNITUDE
    if LANES:
        amax = tl.max(amax, 3, keep_dims=True)
    if ROWS:
        amax = tl.max(amax, 1, keep_dims=True)
    amax = amax.to(tl.float32, bitcast=True)

    across = tl.cdiv(columns, 16)
    index = row * across + column_block
    block = index  # that an element lies in: what noise of scales depends on
    if LANES and ROWS:
        block = row_block * across + column_block
    elif ROWS:
        block = row_block * columns + column
    outer = (1.0, 1.0)
    if TWO_LEVEL:
        outer = _outer_scale_of(amax_ptr, decode_ptr, block, blocks, per_row, LARGEST, BY_ROW)
    source = (data_ptr, word0, word1)
    scale, inverse = block_scales_of(
        bits, amax, outer, block, source, LANES, ROWS, TWO_LEVEL, UP, RULE, TO_CODE
    )
    code = codes_of(bits, inverse, index, column % 16, source, STOCHASTIC)
    if codes_ptr is not None:
        if PACKED:
            _store_packed(code, scale, place, rows, columns, codes_ptr, scale_ptr, LANES, ROWS)
        else:
            _store_codes(code, scale, place, rows, columns, codes_ptr, scale_ptr, LANES, ROWS)
    if out_ptr is not None:
        values = code * scale
        if TWO_LEVEL and SCALED:
            values = values * outer[1]
        _write(
            values, minus, plus_ptr, out_ptr, place, rows, columns, signs, SIZE, SIGNED, LANES, SAME
        )


@triton.jit(do_not_specialize=["rows", "width", "sign0", "sign1", "blocks", "per_row"])
def unpack(
    codes_ptr, scale_ptr, decode_ptr, plus_ptr, out_ptr, sign_ptr, sign0, sign1, blocks, per_row,
    rows, columns, left_ptr, left_scale_ptr, left_decode_ptr, lengths_ptr, right_ptr,
    right_scale_ptr, right_decode_ptr, width,
    GR: tl.constexpr, GC: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    BY_ROW: tl.constexpr, SIZE: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return plus + the values of a matrix that `quantize` packed, times the scale at `decode_ptr`.

    `blocks`, `per_row`, BY_ROW and WIDTH are as in `quantize`.
    """
    place = place_of_tile(rows, columns, GR, GC)
    _, column_block, row, column = place
    inside, _ = inside_of(place, rows, columns)
    values = packed_values(codes_ptr, scale_ptr, row, column, columns, inside, LANES, ROWS)
    if decode_ptr is not None:
        if BY_ROW:
            block = row * tl.cdiv(columns, 16) + column_block
            decode = tl.load(decode_ptr + block // per_row, mask=block < blocks, other=0.0)
        else:
            decode = tl.load(decode_ptr)
        values = values * decode
    signs = (sign_ptr, sign0, sign1)
    added = 0.0
    if WIDTH:
        low = (
            left_ptr, left_scale_ptr, left_decode_ptr, lengths_ptr,
            right_ptr, right_scale_ptr, right_decode_ptr, width,
        )  # fmt: skip
        added = low_rank_of(low, rows, columns, GR, GC, LANES, WIDTH)
    _write(
        values, added, plus_ptr, out_ptr, place, rows, columns, signs, SIZE, SIGNED, LANES,
        WIDTH > 0,
    )  # fmt: skip
