"""The NVFP4 quantizers as Triton kernels, on CUDA devices; on CPUs through Triton's interpreter.

They compute plus + Q(x - minus), or the codes and scales of Q(x - minus), with the same bits as
`numerics.definition`, except with rotations and low-rank parts; see `fused`. Equal bits rest on
these rules:

- Amax compares magnitudes as integers; see `triton_amax`.
- Clamps are comparisons, which keep NaN. Division is IEEE's (`div_rn`).
- `floor` may or may not flush subnormal numbers to zero; no result depends on it.
- E4M3 rounding is fp32 arithmetic, without the hardware's 8-bit casts.
- Fused multiply-adds are disabled (`enable_fp_fusion=False`), though none would change a result.

A program processes one tile; see `triton_tiles`. If SIZE > 0, the matrix is first rotated in groups
of SIZE entries along its blocks.
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

    The first program, or the first block of a row, writes the decode scale to `decode_ptr`.

    Args:
        amax_ptr: largest magnitudes, as bits, which are scaled to LARGEST.
        decode_ptr: fp32, one for each magnitude.
        block: numbers of row blocks; there are `blocks` in all, `per_row` in each row.
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
def _store_packed(
    code, scale, place, rows, columns, codes_ptr, scale_ptr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    """Write codes and scales in the layout of `layout.Packed`.

    The second code of a byte comes from the next row block, or from half a block further down. A
    row of row blocks has one block or an even number.
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
    """Add `minus` if SAME, else the tensor at `plus_ptr`, if any; see `reference.add_back`."""
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
    """Write a tile's values; if SIZE > 0, rotate them back and write rows that pad blocks too."""
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
    SAME: tl.constexpr, RULE: tl.constexpr, TO_CODE: tl.constexpr,
    LARGEST: tl.constexpr, BY_ROW: tl.constexpr, SIZE: tl.constexpr, SIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write plus + Q(x - minus) of a matrix, in blocks along LANES, ROWS or both.

    Values go to `out_ptr`, codes to `codes_ptr` and block scales to `scale_ptr`, unless these are
    None; see `layout.Packed`. With SAME, `minus` is also added. RULE is "", "search",
    "four-over-six" or "eden". TO_CODE is 1 / (the code to which amax is scaled); LARGEST is this
    code times the scale of the tensor's largest block. With BY_ROW each row has an outer scale; the
    tensor has `blocks` blocks, `per_row` in each row. If WIDTH > 0, a low-rank matrix of rank
    `width` is both subtracted and added; see `layout.Low`.
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
    block = index  # number of an element's block, for the noise of scales
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
        _store_packed(code, scale, place, rows, columns, codes_ptr, scale_ptr, LANES, ROWS)
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
    """Write plus + decode * the values of a matrix that `quantize` packed.

    `decode_ptr` holds the outer scale. `blocks`, `per_row`, BY_ROW and WIDTH are as in `quantize`.
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
