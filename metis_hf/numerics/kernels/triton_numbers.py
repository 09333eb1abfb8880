"""Device functions of the Triton kernels, for CUDA: noise, E2M1, E4M3 and block scales.

They give the same bits as `noise`, `numerics.definition` and `numerics.scaling`; `triton_kernels`
lists the conditions for that.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from metis_hf import noise
from metis_hf.numerics import scaling
from metis_hf.numerics.formats import E4M3, FLT_MAX, NVFP4

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_SIGN = tl.constexpr(-(2**31))
MAGNITUDE = tl.constexpr(2**31 - 1)
LARGEST_FP32 = tl.constexpr(FLT_MAX)
_M1, _M2 = tl.constexpr(noise._M1), tl.constexpr(noise._M2)
_MAX_CODE = tl.constexpr(NVFP4.element.max)
_MAX_SCALE = tl.constexpr(E4M3.max)
_SMALLEST_BASE = tl.constexpr(scaling.SMALLEST_BASE)
_LARGEST_ERROR = tl.constexpr(scaling.LARGEST_ERROR)
_LARGEST_PRODUCT = tl.constexpr(scaling.LARGEST_PRODUCT)
_EDEN_CLIP = tl.constexpr(scaling.EDEN_CLIP)
# The candidate scales after the first, which is 1.
_, *_OTHERS = scaling.TRIED_SCALES[scaling.ScaleRule.SEARCH]
_T1, _T2, _T3, _T4, _T5 = (tl.constexpr(factor) for factor in _OTHERS)
_FOUR = tl.constexpr(scaling.TRIED_SCALES[scaling.ScaleRule.FOUR_OVER_SIX][1])
_ADDED = 1.5 * 2.0**23  # times a power of two: fp32 numbers around it are spaced by that power
_MAGIC = tl.constexpr(_ADDED)
_LOW_MAGIC, _HIGH_MAGIC = tl.constexpr(_ADDED / 2), tl.constexpr(2 * _ADDED)
_SCALE_NORMAL = tl.constexpr(2.0**-6)  # smallest normal number of E4M3
SCALE_SPACING = tl.constexpr(2.0**-9)  # spacing of E4M3 below it
_SCALE_STEPS = tl.constexpr(2.0**9)
_SCALE_MAGIC = tl.constexpr(_ADDED * 2.0**-9)
DROPPED = tl.constexpr(20)  # mantissa bits of fp32 that E4M3 does not have
_EXPONENT = tl.constexpr(0x7F800000)  # exponent bits of fp32
_KEPT = tl.constexpr(-(1 << 20))
_BELOW_ONE, _BELOW_HALF = tl.constexpr((1 << 20) - 1), tl.constexpr((1 << 19) - 1)
# Subtracted from fp32 bits, shifted to a small format's mantissa, to change the exponent's bias.
E4M3_OFFSET = tl.constexpr((127 - 7) << 3)
_E2M1_OFFSET = tl.constexpr((127 - 1) << 1)
E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def hash_bits(h):
    """Compute `noise._hash`."""
    h = tl.mul(h ^ ((h >> 16) & 0xFFFF), _M1, sanitize_overflow=False)
    h = tl.mul(h ^ ((h >> 15) & 0x1FFFF), _M2, sanitize_overflow=False)
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def uniform(index, lane, source):
    """Compute `noise.uniform` for the elements `lane` of the blocks `index`."""
    data_ptr, word0, word1 = source
    if data_ptr is None:
        first = hash_bits(word0)
    else:
        first = hash_bits(tl.add(tl.load(data_ptr), word0, sanitize_overflow=False))
    second = hash_bits(tl.add(first, word1, sanitize_overflow=False))
    block = hash_bits(tl.add(index, first, sanitize_overflow=False))
    h = tl.add(block, second, sanitize_overflow=False) ^ hash_bits(lane)
    h = tl.mul(h, _M1, sanitize_overflow=False)
    h = tl.mul(h ^ ((h >> 15) & 0x1FFFF), _M2, sanitize_overflow=False)
    return (h >> 8).to(tl.float32) * (2.0**-24) + 0.5


@triton.jit
def bits_of(x):
    """Return the fp32 bits of x, as int32."""
    if x.dtype == tl.bfloat16:
        # No float cast: the interpreter's is wrong for subnormal numbers.
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def cast(value, dtype: tl.constexpr):
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
def multiply_add(total, a, b):
    """Return total + a @ b, of one dtype, accumulated in fp32."""
    if INTERPRETED:  # the interpreter's `dot` mistakes bf16 numbers for integers
        a = bits_of(a).to(tl.float32, bitcast=True)
        b = bits_of(b).to(tl.float32, bitcast=True)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def add_product(total, a, b, LEFT: tl.constexpr):
    """Return total + a @ b for one fp32 and one bf16 matrix; a is the fp32 one if LEFT, else b.

    The fp32 matrix is split into a sum of three bf16 ones. Tensor cores multiply each exactly and
    accumulate in fp32.
    """
    rest = a if LEFT else b
    for _ in tl.static_range(3):
        part = cast(rest, tl.bfloat16)
        total = multiply_add(total, part, b) if LEFT else multiply_add(total, a, part)
        rest = rest - bits_of(part).to(tl.float32, bitcast=True)
    return total


@triton.jit
def _round_e4m3(value, UP: tl.constexpr):
    """Compute `scaling.round_scale`."""
    bits = value.to(tl.int32, bitcast=True)
    if UP:
        normal = tl.add(bits, _BELOW_ONE, sanitize_overflow=False)
        steps = value * _SCALE_STEPS
        small = tl.floor(steps)
        # A comparison, since `ceil` is not documented to keep subnormal numbers.
        small = tl.where(steps > small, small + 1.0, small) * SCALE_SPACING
    else:
        normal = tl.add(bits, ((bits >> DROPPED) & 1) + _BELOW_HALF, sanitize_overflow=False)
        small = (value + _SCALE_MAGIC) - _SCALE_MAGIC
    normal = (normal & _KEPT).to(tl.float32, bitcast=True)
    return tl.where(value >= _SCALE_NORMAL, normal, small)


@triton.jit
def e4m3_bits(scale):
    """Return the 8 bits, as int32, of an E4M3 value >= 0 or NaN."""
    normal = (scale.to(tl.int32, bitcast=True) >> DROPPED) - E4M3_OFFSET
    small = tl.where(scale < _SCALE_NORMAL, scale, 0.0) * _SCALE_STEPS
    bits = tl.where(scale >= _SCALE_NORMAL, normal, small.to(tl.int32))
    return tl.where(scale == scale, bits, E4M3_NAN)


@triton.jit
def e2m1_bits(code):
    """Return the 4 bits, as int32, of an E2M1 value."""
    bits = code.to(tl.int32, bitcast=True)
    magnitude = tl.abs(code)
    normal = ((bits & MAGNITUDE) >> 22) - _E2M1_OFFSET
    small = tl.where(magnitude > 0.0, 1, 0)
    return tl.where(magnitude >= 1.0, normal, small) | ((bits >> 28) & 8)


@triton.jit
def _by_range(magnitude, LOW: tl.constexpr, MIDDLE: tl.constexpr, HIGH: tl.constexpr):
    """Choose a constant by binade of E2M1: below 2, below 4, above."""
    return tl.where(magnitude < 2.0, LOW, tl.where(magnitude < 4.0, MIDDLE, HIGH))


@triton.jit
def _nearest(magnitude):
    """Round values in [0, 6] to the nearest E2M1 value, ties to even."""
    magic = _by_range(magnitude, _LOW_MAGIC, _MAGIC, _HIGH_MAGIC)
    return (magnitude + magic) - magic


@triton.jit
def outer_scale(largest, LARGEST: tl.constexpr):
    """Return the (encode, decode) scales that bring a magnitude, given as bits, to LARGEST."""
    largest = largest.to(tl.float32, bitcast=True)
    encode = tl.math.div_rn(LARGEST, largest)
    encode = tl.where(encode > LARGEST_FP32, LARGEST_FP32, encode)
    encode = tl.where(largest == 0, 1.0, encode)
    return encode, tl.math.div_rn(1.0, encode)


@triton.jit
def _scale(wanted, decode, TWO_LEVEL: tl.constexpr, UP: tl.constexpr):
    """Return (block scales, factors for the elements)."""
    clamped = tl.where(wanted > _MAX_SCALE, _MAX_SCALE, wanted)
    scale = _round_e4m3(tl.where(wanted > LARGEST_FP32, float("nan"), clamped), UP)
    decoded = scale
    if TWO_LEVEL:
        decoded = scale * decode
    inverse = tl.math.div_rn(1.0, decoded)
    return scale, tl.where(inverse > LARGEST_FP32, LARGEST_FP32, inverse)


@triton.jit
def _sum_of_block(values, LANES: tl.constexpr, ROWS: tl.constexpr):
    if LANES:
        values = tl.sum(values, 3, keep_dims=True)
    if ROWS:
        values = tl.sum(values, 1, keep_dims=True)
    return values


@triton.jit
def _sum_of_products(products, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Sum `scaling.whole_products` of products >= 0 by block; NaN counts as the largest."""
    COUNT: tl.constexpr = 256 if LANES and ROWS else 16
    products = tl.where(products < _LARGEST_PRODUCT, products, _LARGEST_PRODUCT)
    whole = tl.floor(products * (2.0**30 / _LARGEST_PRODUCT / COUNT)).to(tl.int32)
    return _sum_of_block(whole, LANES, ROWS).to(tl.float32)


@triton.jit
def _corrected(magnitude, scale, inverse, index, source, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Compute `scaling.corrected_scale` of the blocks `index`."""
    scaled = magnitude * inverse
    codes = _nearest(tl.where(scaled > _MAX_CODE, _MAX_CODE, scaled))
    energy = _sum_of_products(scaled * scaled, LANES, ROWS)
    projection = _sum_of_products(scaled * codes, LANES, ROWS)
    usable = (projection > 0.0) & (scale > 0.0)
    ratio = tl.math.div_rn(energy, tl.where(usable, projection, 1.0))
    value = scale * tl.where(usable, ratio, 1.0)
    value = tl.where(value > _MAX_SCALE, _MAX_SCALE, value)
    bits = value.to(tl.int32, bitcast=True)
    normal = value >= _SCALE_NORMAL
    small = tl.floor(value * _SCALE_STEPS) * SCALE_SPACING
    low = tl.where(normal, (bits & _KEPT).to(tl.float32, bitcast=True), small)
    gap = (bits & _EXPONENT).to(tl.float32, bitcast=True) * 0.125
    gap = tl.where(normal, gap, SCALE_SPACING)
    threshold = uniform(index // 16, index % 16, source)
    return tl.where(threshold * gap < value - low, low + gap, low)


@triton.jit
def _better(
    best, factor, block,
    LANES: tl.constexpr, ROWS: tl.constexpr, TWO_LEVEL: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """Return the better of `best` and the scale base * factor, as (scale, inverse, error)."""
    base, to_base, decode, magnitude, wanted = block
    scale, inverse = _scale(base * factor, decode, TWO_LEVEL, UP)
    scaled = magnitude * inverse
    codes = _nearest(tl.where(scaled > _MAX_CODE, _MAX_CODE, scaled))
    error = (codes * scale - wanted) * to_base
    squared = error * error
    squared = tl.where(squared > _LARGEST_ERROR, _LARGEST_ERROR, squared)
    # Whole numbers, whose sum is exact: see `scaling.whole_errors`.
    COUNT: tl.constexpr = 256 if LANES and ROWS else 16
    error = tl.floor(squared * (2.0**24 / _LARGEST_ERROR / COUNT))
    error = _sum_of_block(error, LANES, ROWS)
    if best is None:
        found = scale, inverse, error
    else:
        less = error < best[2]
        found = (
            tl.where(less, scale, best[0]),
            tl.where(less, inverse, best[1]),
            tl.where(less, error, best[2]),
        )
    return found


@triton.jit
def block_scales_of(
    bits, amax, outer, index, source,
    LANES: tl.constexpr, ROWS: tl.constexpr, TWO_LEVEL: tl.constexpr, UP: tl.constexpr,
    RULE: tl.constexpr, TO_CODE: tl.constexpr,
):  # fmt: skip
    """Return (block scales, factors for the elements).

    The RULE "" scales amax to 1 / TO_CODE; "eden" also corrects the scales, with the noise of
    `source` for the blocks `index`; other rules choose the candidate with the least error, as
    `scaling.least_error_scale`. `outer` is (encode, decode) of the tensor or its rows.
    """
    encode, decode = outer
    magnitude = (bits & MAGNITUDE).to(tl.float32, bitcast=True)
    if RULE == "" or RULE == "eden":
        to_scale = TO_CODE
        if TWO_LEVEL:
            to_scale = encode * TO_CODE
        if RULE == "eden":
            amax = amax * _EDEN_CLIP
        scale, inverse = _scale(amax * to_scale, decode, TWO_LEVEL, UP)
        if RULE == "eden":
            scale = _corrected(magnitude, scale, inverse, index, source, LANES, ROWS)
    else:
        wanted = magnitude
        base = tl.math.div_rn(amax, _MAX_CODE)
        if TWO_LEVEL:
            base = base * encode
            wanted = magnitude * encode
            wanted = tl.where(wanted > LARGEST_FP32, LARGEST_FP32, wanted)
        to_base = tl.math.div_rn(1.0, tl.where(base < _SMALLEST_BASE, _SMALLEST_BASE, base))
        block = (base, to_base, decode, magnitude, wanted)
        best = _better(None, 1.0, block, LANES, ROWS, TWO_LEVEL, UP)
        if RULE == "search":
            best = _better(best, _T1, block, LANES, ROWS, TWO_LEVEL, UP)
            best = _better(best, _T2, block, LANES, ROWS, TWO_LEVEL, UP)
            best = _better(best, _T3, block, LANES, ROWS, TWO_LEVEL, UP)
            best = _better(best, _T4, block, LANES, ROWS, TWO_LEVEL, UP)
            best = _better(best, _T5, block, LANES, ROWS, TWO_LEVEL, UP)
        else:
            best = _better(best, _FOUR, block, LANES, ROWS, TWO_LEVEL, UP)
        scale, inverse, _ = best
    return scale, inverse


@triton.jit
def codes_of(bits, inverse, index, lane, source, STOCHASTIC: tl.constexpr):
    """Round elements, given as fp32 bits, to E2M1 values in fp32, without their scale."""
    scaled = (bits.to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True)
    magnitude = (scaled & MAGNITUDE).to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude > _MAX_CODE, _MAX_CODE, magnitude)
    if STOCHASTIC:
        threshold = uniform(index, lane, source)
        steps = magnitude * _by_range(magnitude, 2.0, 1.0, 0.5)
        lower = tl.floor(steps)
        up = tl.where(steps - lower > threshold, 1.0, 0.0)
        code = (lower + up) * _by_range(magnitude, 0.5, 1.0, 2.0)
    else:
        code = _nearest(magnitude)
    signed = code.to(tl.int32, bitcast=True) | (scaled & _SIGN)
    return signed.to(tl.float32, bitcast=True)
