"""The formulation as Triton kernels, for CUDA devices; on CPU through Triton's interpreter.

The same arithmetic as `formulation`, to the bit: plus + Q(x - minus), or the codes and scales of
Q(x). What may not be left to a GPU's choice:

- Amax is taken of magnitudes as integers, which are ordered as the numbers, NaN above infinity:
  a GPU's maximum drops NaN, and integers can be compared atomically in any order.
- Clamps are comparisons, which leave NaN where it is. Division is IEEE's (`div_rn`).
- `floor` may flush subnormal numbers to zero; nothing here depends on which of the two it gives.
- E4M3 is fp32 arithmetic; no 8-bit cast of the hardware is used.
- Nothing is contracted into fused multiply-adds (`enable_fp_fusion=False`), though none would show.

A program works on a tile [GR 16 GC 16] of a matrix: GR x GC squares of 16 x 16. Blocks lie along
its LANES (the last dimension: row blocks), its ROWS (the second: column blocks), or both (squares).
"""

from __future__ import annotations

import triton
import triton.language as tl

from metis_hf.numerics.kernels.triton_numbers import (
    DROPPED,
    E4M3_NAN,
    E4M3_OFFSET,
    LARGEST_FP32,
    MAGNITUDE,
    SCALE_SPACING,
    bits_of,
    block_scales_of,
    cast,
    codes_of,
    e2m1_bits,
    e4m3_bits,
    outer_scale,
)


@triton.jit
def _place(rows, columns, GR: tl.constexpr, GC: tl.constexpr):
    """Return where this program's tile lies: indices of blocks and of elements."""
    across = tl.cdiv(columns, 16 * GC)
    tile = tl.program_id(0)
    row_block = (tile // across) * GR + tl.arange(0, GR)[:, None, None, None]
    column_block = (tile % across) * GC + tl.arange(0, GC)[None, None, :, None]
    row = row_block * 16 + tl.arange(0, 16)[None, :, None, None]
    column = column_block * 16 + tl.arange(0, 16)[None, None, None, :]
    return row_block, column_block, row, column


@triton.jit
def _inside(place, rows, columns):
    """Return which elements of a tile lie in the matrix, and their places in a contiguous one."""
    _, _, row, column = place
    return (row < rows) & (column < columns), row.to(tl.int64) * columns + column


@triton.jit
def _read(x_ptr, minus_ptr, place, rows, columns, row_stride, column_stride):
    """Load a tile's (bits of x - minus in fp32, minus or 0.0); x is zero outside the matrix."""
    _, _, row, column = place
    inside, at = _inside(place, rows, columns)
    offset = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    bits = bits_of(tl.load(x_ptr + offset, mask=inside, other=0.0))
    minus = 0.0
    if minus_ptr is not None:
        minus = tl.load(minus_ptr + at, mask=inside, other=0.0)
        bits = (bits.to(tl.float32, bitcast=True) - minus).to(tl.int32, bitcast=True)
    return bits, minus


@triton.jit(do_not_specialize=["rows"])
def find_amax(
    x_ptr,
    minus_ptr,
    amax_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    GR: tl.constexpr,
    GC: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Write the largest magnitude of a matrix, as bits, into an int32 that is 0; or of each row."""
    place = _place(rows, columns, GR, GC)
    bits, _ = _read(x_ptr, minus_ptr, place, rows, columns, row_stride, column_stride)
    if BY_ROW:
        largest = tl.max(tl.max(bits & MAGNITUDE, 3, keep_dims=True), 2, keep_dims=True)
        row = place[2]
        tl.atomic_max(amax_ptr + row, largest, mask=row < rows, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr, tl.max(bits & MAGNITUDE), sem="relaxed")


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
    """Write codes and scales as `layout.Packed` has them; rows of row blocks are one block each.

    The other element of a byte lies in the next row, or half a block further down.
    """
    row_block, column_block, row, column = place
    GR: tl.constexpr = code.shape[0]
    GC: tl.constexpr = code.shape[2]
    bits = e2m1_bits(code)
    half = tl.arange(0, 8)[None, :, None, None]
    if LANES and not ROWS:
        packed = tl.sum(tl.reshape(bits << ((row % 2) * 4), (GR, 8, 2, GC, 16)), 2)
        byte = (row_block * 8 + half).to(tl.int64) * 16 + column
        inside = (row_block * 16 + half * 2 < rows) & (column < columns)
        at = row.to(tl.int64)
        tl.store(
            scale_ptr + at, e4m3_bits(scale).to(tl.uint8), mask=(row < rows) & (column_block < 1)
        )
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


@triton.jit(do_not_specialize=["rows", "word0", "word1", "blocks", "per_row"])
def quantize(
    x_ptr,
    minus_ptr,
    plus_ptr,
    amax_ptr,
    decode_ptr,
    out_ptr,
    scale_ptr,
    data_ptr,
    word0,
    word1,
    blocks,
    per_row,
    rows,
    columns,
    row_stride,
    column_stride,
    GR: tl.constexpr,
    GC: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    UP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALED: tl.constexpr,
    SAME: tl.constexpr,
    PACKED: tl.constexpr,
    RULE: tl.constexpr,
    TO_CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Return plus + Q(x - minus) of a matrix, in blocks along LANES, ROWS or both.

    Values go to `out_ptr`; where there is a `scale_ptr`, codes go there and scales to it: as
    `Packed` has them with PACKED, else as files do. With SAME `minus` is what is added too. RULE is
    "", "search", "four-over-six" or "eden"; TO_CODE is 1 / the code that amax gets, LARGEST that
    code times the scale of the tensor's largest block. With BY_ROW rows have a scale each instead
    of the tensor: rows of `per_row` blocks, of a tensor with so many `blocks`.
    """
    place = _place(rows, columns, GR, GC)
    row_block, column_block, row, column = place
    bits, minus = _read(x_ptr, minus_ptr, place, rows, columns, row_stride, column_stride)
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
    if PACKED:
        _store_packed(code, scale, place, rows, columns, out_ptr, scale_ptr, LANES, ROWS)
    elif scale_ptr is not None:
        _store_codes(code, scale, place, rows, columns, out_ptr, scale_ptr, LANES, ROWS)
    else:
        inside, at = _inside(place, rows, columns)
        values = code * scale
        if TWO_LEVEL and SCALED:
            values = values * outer[1]
        values = _finish(values, minus, plus_ptr, inside, at, SAME)
        tl.store(out_ptr + at, cast(values, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks", "per_row"])
def unpack(
    codes_ptr,
    scale_ptr,
    decode_ptr,
    plus_ptr,
    out_ptr,
    blocks,
    per_row,
    rows,
    columns,
    GR: tl.constexpr,
    GC: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Return plus + the values of a matrix that `quantize` packed, times the scale at `decode_ptr`.

    Rows of row blocks are one block each. `blocks`, `per_row` and BY_ROW are as in `quantize`.
    """
    place = _place(rows, columns, GR, GC)
    row_block, column_block, row, column = place
    inside, at = _inside(place, rows, columns)
    if LANES and not ROWS:
        byte, shift = (row // 2).to(tl.int64) * 16 + column, (row % 2) * 4
        scale_at = row.to(tl.int64) + 0 * column
    else:
        byte = (row_block * 8 + row % 8).to(tl.int64) * columns + column
        shift = ((row % 16) // 8) * 4
        if LANES:
            scale_at = row_block.to(tl.int64) * tl.cdiv(columns, 16) + column_block + 0 * column
        else:
            scale_at = row_block.to(tl.int64) * columns + column
    code = (tl.load(codes_ptr + byte, mask=inside, other=0).to(tl.int32) >> shift) & 15
    size = (code & 7).to(tl.float32)
    value = tl.where(size < 4.0, size * 0.5, tl.where(size < 6.0, size - 2.0, size * 2.0 - 8.0))
    value = (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    # Without the sign, which NaN may have.
    bits = tl.load(scale_ptr + scale_at, mask=inside, other=0).to(tl.int32) & E4M3_NAN
    normal = ((bits + E4M3_OFFSET) << DROPPED).to(tl.float32, bitcast=True)
    scale = tl.where(bits >= 8, normal, bits.to(tl.float32) * SCALE_SPACING)
    values = value * tl.where(bits == E4M3_NAN, float("nan"), scale)
    if decode_ptr is not None:
        if BY_ROW:
            decode = tl.load(decode_ptr + row // per_row, mask=row < blocks, other=0.0)
        else:
            decode = tl.load(decode_ptr)
        values = values * decode
    values = _finish(values, 0.0, plus_ptr, inside, at, False)
    tl.store(out_ptr + at, cast(values, out_ptr.dtype.element_ty), mask=inside)
