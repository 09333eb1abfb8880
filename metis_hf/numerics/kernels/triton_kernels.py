"""The formulation as Triton kernels, for CUDA devices; on CPU through Triton's interpreter.

The arithmetic is that of `formulation`, to the bit: plus + Q(x - minus), or the codes and scales of
Q(x). What may not be left to a GPU's choice:

- Amax is taken of magnitudes as integers, whose order is that of the numbers, NaN above infinity:
  a GPU's maximum drops NaN, and integers can be compared atomically in any order.
- Clamps are comparisons, which leave NaN where it is. Division is IEEE's (`div_rn`).
- `floor` may flush subnormal numbers to zero; nothing here depends on which of the two it gives.
- E4M3 is fp32 arithmetic; no 8-bit cast of the hardware is used.
- Nothing is contracted into fused multiply-adds (`enable_fp_fusion=False`), though none would show.

A program works on a tile [GR 16 GC 16] of a matrix: GR x GC squares of 16 x 16. Blocks lie along
its LANES (the last dimension: row blocks), its ROWS (the second: column blocks), or both (squares).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from metis_hf import noise
from metis_hf.numerics.formats import E4M3, FLT_MAX
from metis_hf.numerics.kernels import block_scales

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_SIGN = tl.constexpr(-(2**31))
_MAGNITUDE = tl.constexpr(2**31 - 1)
_FLT_MAX = tl.constexpr(FLT_MAX)
_M1, _M2 = tl.constexpr(noise._M1), tl.constexpr(noise._M2)
_MAX_CODE = tl.constexpr(block_scales.MAX_CODE)
_INVERSE_MAX_CODE = tl.constexpr(block_scales._INVERSE_MAX_CODE)
_MAX_SCALE = tl.constexpr(E4M3.max)
_LARGEST = tl.constexpr(E4M3.max * block_scales.MAX_CODE)
_MAGIC = tl.constexpr(block_scales._MAGIC)
_LOW_MAGIC, _HIGH_MAGIC = (
    tl.constexpr(block_scales._MAGIC / 2),
    tl.constexpr(2 * block_scales._MAGIC),
)
_SCALE_NORMAL = tl.constexpr(block_scales._NORMAL)
_SCALE_SPACING = tl.constexpr(block_scales._SPACING)
_SCALE_STEPS = tl.constexpr(1 / block_scales._SPACING)
_SCALE_MAGIC = tl.constexpr(block_scales._MAGIC * block_scales._SPACING)
_DROPPED = tl.constexpr(block_scales._DROPPED)
_KEPT = tl.constexpr(-(1 << block_scales._DROPPED))
_BELOW_ONE = tl.constexpr((1 << block_scales._DROPPED) - 1)
_BELOW_HALF = tl.constexpr((1 << block_scales._DROPPED - 1) - 1)
# Bits of fp32 without what a small format drops, less the difference of the exponents' biases.
_E4M3_OFFSET = tl.constexpr((127 - 7) << 3)
_E2M1_OFFSET = tl.constexpr((127 - 1) << 1)
_E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def _hash(h):
    """Compute `noise._hash`."""
    h = tl.mul(h ^ ((h >> 16) & 0xFFFF), _M1, sanitize_overflow=False)
    h = tl.mul(h ^ ((h >> 15) & 0x1FFFF), _M2, sanitize_overflow=False)
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def _uniform(index, lane, source):
    """Compute `formulation._uniform` of the elements `lane` of the blocks `index`."""
    data_ptr, word0, word1 = source
    if data_ptr is None:
        first = _hash(word0)
    else:
        first = _hash(tl.add(tl.load(data_ptr), word0, sanitize_overflow=False))
    second = _hash(tl.add(first, word1, sanitize_overflow=False))
    block = _hash(tl.add(index, first, sanitize_overflow=False))
    h = tl.add(block, second, sanitize_overflow=False) ^ _hash(lane)
    h = tl.mul(h, _M1, sanitize_overflow=False)
    h = tl.mul(h ^ ((h >> 15) & 0x1FFFF), _M2, sanitize_overflow=False)
    return (h >> 8).to(tl.float32) * (2.0**-24) + 0.5


@triton.jit
def _bits(x):
    """Return the bits of x in fp32."""
    if x.dtype == tl.bfloat16:
        # Not by way of a float cast: the interpreter's is wrong for subnormal numbers.
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _cast(value, dtype: tl.constexpr):
    """Round fp32 to `dtype`, nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's own cast truncates.
        bits = value.to(tl.int32, bitcast=True)
        even = tl.add(bits, ((bits >> 16) & 1) + 0x7FFF, sanitize_overflow=False)
        bits = tl.where(value == value, even, 0x7FC00000) >> 16
        result = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(dtype)
    return result


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
    bits = _bits(tl.load(x_ptr + offset, mask=inside, other=0.0))
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
):
    """Write the largest magnitude of a matrix, as bits, into an int32 that is 0."""
    place = _place(rows, columns, GR, GC)
    bits, _ = _read(x_ptr, minus_ptr, place, rows, columns, row_stride, column_stride)
    tl.atomic_max(amax_ptr, tl.max(bits & _MAGNITUDE), sem="relaxed")


@triton.jit
def _tensor_scale(amax_ptr):
    """Return the (encode, decode) scales of the whole tensor."""
    largest = tl.load(amax_ptr).to(tl.float32, bitcast=True)
    encode = tl.math.div_rn(_LARGEST, largest)
    encode = tl.where(encode > _FLT_MAX, _FLT_MAX, encode)
    encode = tl.where(largest == 0, 1.0, encode)
    return encode, tl.math.div_rn(1.0, encode)


@triton.jit
def _round_e4m3(value, UP: tl.constexpr):
    """Compute `block_scales._round_e4m3`."""
    bits = value.to(tl.int32, bitcast=True)
    if UP:
        normal = tl.add(bits, _BELOW_ONE, sanitize_overflow=False)
        steps = value * _SCALE_STEPS
        small = tl.floor(steps)
        # A comparison: that `ceil` keeps subnormal numbers is not said anywhere.
        small = tl.where(steps > small, small + 1.0, small) * _SCALE_SPACING
    else:
        normal = tl.add(bits, ((bits >> _DROPPED) & 1) + _BELOW_HALF, sanitize_overflow=False)
        small = (value + _SCALE_MAGIC) - _SCALE_MAGIC
    normal = (normal & _KEPT).to(tl.float32, bitcast=True)
    return tl.where(value >= _SCALE_NORMAL, normal, small)


@triton.jit
def _e4m3_bits(scale):
    """Return the 8 bits, as int32, of an E4M3 value >= 0 or NaN."""
    normal = (scale.to(tl.int32, bitcast=True) >> _DROPPED) - _E4M3_OFFSET
    small = tl.where(scale < _SCALE_NORMAL, scale, 0.0) * _SCALE_STEPS
    bits = tl.where(scale >= _SCALE_NORMAL, normal, small.to(tl.int32))
    return tl.where(scale == scale, bits, _E4M3_NAN)


@triton.jit
def _e2m1_bits(code):
    """Return the 4 bits, as int32, of an E2M1 value."""
    bits = code.to(tl.int32, bitcast=True)
    magnitude = tl.abs(code)
    normal = ((bits & _MAGNITUDE) >> 22) - _E2M1_OFFSET
    small = tl.where(magnitude > 0.0, 1, 0)
    return tl.where(magnitude >= 1.0, normal, small) | ((bits >> 28) & 8)


@triton.jit
def _by_range(magnitude, LOW: tl.constexpr, MIDDLE: tl.constexpr, HIGH: tl.constexpr):
    """Choose a constant for each binade of E2M1: below 2, below 4, above."""
    return tl.where(magnitude < 2.0, LOW, tl.where(magnitude < 4.0, MIDDLE, HIGH))


@triton.jit
def _scales(amax, amax_ptr, TWO_LEVEL: tl.constexpr, UP: tl.constexpr):
    """Return (block scales, what elements are multiplied by, decode scale of the tensor)."""
    to_scale = _INVERSE_MAX_CODE
    decode = 1.0
    if TWO_LEVEL:
        encode, decode = _tensor_scale(amax_ptr)
        to_scale = encode * _INVERSE_MAX_CODE
    wanted = amax * to_scale
    clamped = tl.where(wanted > _MAX_SCALE, _MAX_SCALE, wanted)
    scale = _round_e4m3(tl.where(wanted > _FLT_MAX, float("nan"), clamped), UP)
    decoded = scale
    if TWO_LEVEL:
        decoded = scale * decode
    inverse = tl.math.div_rn(1.0, decoded)
    return scale, tl.where(inverse > _FLT_MAX, _FLT_MAX, inverse), decode


@triton.jit
def _codes(bits, inverse, index, lane, source, STOCHASTIC: tl.constexpr):
    """Return elements in E2M1 from their bits in fp32."""
    scaled = (bits.to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True)
    magnitude = (scaled & _MAGNITUDE).to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude > _MAX_CODE, _MAX_CODE, magnitude)
    if STOCHASTIC:
        uniform = _uniform(index, lane, source)
        steps = magnitude * _by_range(magnitude, 2.0, 1.0, 0.5)
        lower = tl.floor(steps)
        up = tl.where(steps - lower > uniform, 1.0, 0.0)
        code = (lower + up) * _by_range(magnitude, 0.5, 1.0, 2.0)
    else:
        magic = _by_range(magnitude, _LOW_MAGIC, _MAGIC, _HIGH_MAGIC)
        code = (magnitude + magic) - magic
    signed = code.to(tl.int32, bitcast=True) | (scaled & _SIGN)
    return signed.to(tl.float32, bitcast=True)


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
        nibbles = _e2m1_bits(code) << ((column % 2) * 4)
        packed = tl.sum(tl.reshape(nibbles, (GR, 16, GC, 8, 2)), 4)
        byte = (row.to(tl.int64) * across + column_block) * 8 + pair[None, None, None, :]
        inside = (row < rows) & (column_block < across)
    else:
        nibbles = _e2m1_bits(code) << ((row % 2) * 4)
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
    tl.store(scale_ptr + at, _e4m3_bits(scale).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["rows", "word0", "word1"])
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
):
    """Return plus + Q(x - minus) of a matrix, in blocks along LANES, ROWS or both.

    Values go to `out_ptr`; where there is a `scale_ptr`, codes go there and scales to it. With SAME
    `minus` is what is added too.
    """
    place = _place(rows, columns, GR, GC)
    _, column_block, row, column = place
    bits, minus = _read(x_ptr, minus_ptr, place, rows, columns, row_stride, column_stride)
    amax = bits & _MAGNITUDE
    if LANES:
        amax = tl.max(amax, 3, keep_dims=True)
    if ROWS:
        amax = tl.max(amax, 1, keep_dims=True)
    amax = amax.to(tl.float32, bitcast=True)
    scale, inverse, decode = _scales(amax, amax_ptr, TWO_LEVEL, UP)
    index = row * tl.cdiv(columns, 16) + column_block
    source = (data_ptr, word0, word1)
    code = _codes(bits, inverse, index, column % 16, source, STOCHASTIC)
    if TWO_LEVEL:
        tl.store(decode_ptr, decode, mask=tl.program_id(0) == 0)
    if scale_ptr is not None:
        _store_codes(code, scale, place, rows, columns, out_ptr, scale_ptr, LANES, ROWS)
    else:
        inside, at = _inside(place, rows, columns)
        values = code * scale
        if TWO_LEVEL and SCALED:
            values = values * decode
        if SAME or plus_ptr is not None:
            # See `reference.add_back`.
            values = tl.where(values > _FLT_MAX, _FLT_MAX, values)
            if SAME:
                values = values + minus
            else:
                values = values + tl.load(plus_ptr + at, mask=inside, other=0.0)
        tl.store(out_ptr + at, _cast(values, out_ptr.dtype.element_ty), mask=inside)
