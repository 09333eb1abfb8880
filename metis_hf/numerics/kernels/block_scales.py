"""Block scales of NVFP4 for `formulation`: by amax, by Four Over Six, and MS-EDEN's correction.

The same arithmetic as `metis_hf.numerics.scaling`, to the bit. What is summed over a block are
whole numbers, so that sums are exact and do not depend on how a compiler cuts up a reduction. Sums
of errors fit into fp32, which vector units add.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metis_hf.numerics.formats import E4M3, FLT_MAX, NVFP4
from metis_hf.numerics.scaling import (
    EDEN_CLIP,
    SMALLEST_BASE,
    TRIED_SCALES,
    ScaleRule,
    largest_code,
    largest_value,
    whole_errors,
    whole_products,
)

BLOCK = 16
MAX_CODE = 6.0
_MAGIC = 1.5 * 2.0**23  # times a power of two: fp32 numbers around it are that power apart
_SPACING = 2.0**-9  # of E4M3 values below its smallest normal number
_NORMAL = 2.0**-6
_DROPPED = 20  # mantissa bits of fp32 that E4M3 lacks
_EXPONENT = 0x7F800000  # of the bits of an fp32 number


def stored(x: Tensor) -> Tensor:
    """Return the same tensor, which Inductor then keeps in memory and does not compute again."""
    return x.as_strided(x.shape, x.stride())


def _inverse(x: Tensor) -> Tensor:
    """Return 1 / x as a division, which compilers for GPUs can be told to round correctly."""
    return torch.ones_like(x) / x


def by_range(magnitude: Tensor, low: float, middle: float, high: float) -> Tensor:
    """Choose a constant for each binade of E2M1: below 2, below 4, above."""
    highest = torch.full_like(magnitude, high)  # two numbers would have torch's default dtype
    return torch.where(magnitude < 2, low, torch.where(magnitude < 4, middle, highest))


def nearest(magnitude: Tensor) -> Tensor:
    """Round values in [0, 6] to the nearest E2M1 value, ties to even."""
    magic = by_range(magnitude, 0.5 * _MAGIC, _MAGIC, 2 * _MAGIC)
    return (magnitude + magic) - magic


def _round_e4m3(value: Tensor, up: bool) -> Tensor:
    """Round fp32 in [0, 448] or NaN to E4M3, still fp32: nearest with ties to even, or up."""
    bits = value.view(torch.int32)
    if up:
        normal = bits + ((1 << _DROPPED) - 1)
        small = torch.ceil(value * (1 / _SPACING)) * _SPACING
    else:
        normal = bits + ((bits >> _DROPPED) & 1) + ((1 << _DROPPED - 1) - 1)
        small = (value + _MAGIC * _SPACING) - _MAGIC * _SPACING
    normal = (normal & -(1 << _DROPPED)).view(torch.float32)
    # In this order: the bits of a NaN may have overflowed, arithmetic has kept it.
    return torch.where(value >= _NORMAL, normal, small)


def block_scales(
    x: Tensor,
    dims: tuple[int, ...],
    *,
    rule: ScaleRule,
    up: bool,
    two_level: bool,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (block scales, what elements are multiplied by, tensor scale); MS-EDEN's uncorrected.

    Args:
        x: fp32; `dims` are inside a block.
        rule: which code the block's amax is scaled to.
        up: round scales up instead of to nearest.
        two_level: with a scale of the tensor.
        largest: 0-dim fp32, what that is made of; None: the largest magnitude of x.
    """
    amax = x.abs().amax(dims, keepdim=True)
    encode = decode = None
    if two_level:
        largest = stored(amax.amax()) if largest is None else largest
        encode = torch.full_like(largest, largest_value(NVFP4, rule)) / largest
        encode = stored(torch.where(largest == 0, 1.0, encode.clamp(max=FLT_MAX)))
        decode = stored(_inverse(encode))
    if rule in TRIED_SCALES:
        return *_least_error(x, stored(amax), dims, rule, up, encode, decode), decode
    to_code = 1 / largest_code(NVFP4, rule)
    to_scale = to_code if encode is None else encode * to_code
    top = amax * EDEN_CLIP if rule is ScaleRule.EDEN else amax
    return *_scale(top * to_scale, up, decode), decode


def _scale(wanted: Tensor, up: bool, decode: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (block scales, what elements are multiplied by)."""
    # Infinity becomes NaN rather than the largest scale.
    wanted = torch.where(wanted > FLT_MAX, torch.nan, wanted.clamp(max=E4M3.max))
    scale = stored(_round_e4m3(wanted, up))
    decoded = scale if decode is None else scale * decode
    return scale, stored(_inverse(decoded).clamp(max=FLT_MAX))


def _least_error(
    x: Tensor,
    amax: Tensor,
    dims: tuple[int, ...],
    rule: ScaleRule,
    up: bool,
    encode: Tensor | None,
    decode: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `scaling.least_error_scale`."""
    wanted = magnitude = x.abs()
    base = amax / torch.full_like(amax, MAX_CODE)
    if encode is not None:
        base = base * encode
        wanted = (magnitude * encode).clamp(max=FLT_MAX)
    base = stored(base)
    to_base = stored(_inverse(base.clamp(min=SMALLEST_BASE)))

    # All candidates' scales by the same operations: a sixth of the code to generate and compile.
    scales, inverses = _scale(base * _tried(rule, base), up, decode)

    def error(index: int) -> Tensor:
        codes = nearest((magnitude * inverses[index]).clamp(max=MAX_CODE))
        errors = (codes * scales[index] - wanted) * to_base
        whole = whole_errors(errors * errors, _count(dims))
        return stored(whole.sum(dims, keepdim=True))

    scale, inverse, least = scales[0], inverses[0], error(0)
    for index in range(1, len(TRIED_SCALES[rule])):
        new = error(index)
        better = new < least
        scale = torch.where(better, scales[index], scale)
        inverse = torch.where(better, inverses[index], inverse)
        least = torch.where(better, new, least)
    return stored(scale), stored(inverse)


def _tried(rule: ScaleRule, like: Tensor) -> Tensor:
    """Return the factors that a rule tries, [n 1 1 ..], without a tensor that holds them."""
    *others, last = TRIED_SCALES[rule]
    numbers = torch.arange(len(others) + 1, dtype=torch.int32, device=like.device)
    numbers = numbers.view(-1, *[1] * like.dim())
    factors = torch.full_like(numbers, last, dtype=torch.float32)
    for number, factor in enumerate(others):
        factors = torch.where(numbers == number, factor, factors)
    return factors


def corrected(y: Tensor, scale: Tensor, dims: tuple[int, ...], uniform: Tensor) -> Tensor:
    """Compute `scaling.corrected_scale`.

    Args:
        y: elements in units of the scales, not clamped; `dims` are inside a block.
        scale: of blocks.
        uniform: noise, [blocks].
    """
    magnitude = y.abs()
    codes = nearest(magnitude.clamp(max=MAX_CODE))
    energy, projection = (
        _exact_sum(whole_products(products, _count(dims)), dims).float()
        for products in (magnitude * magnitude, magnitude * codes)
    )
    usable = (projection > 0) & (scale > 0)
    factor = torch.where(usable, energy / projection, 1.0)
    value = (scale * factor).clamp(max=E4M3.max)
    bits = value.view(torch.int32)
    # In this order: the bits that are kept of a NaN may be infinity's.
    normal = value >= _NORMAL
    low = (bits & -(1 << _DROPPED)).view(torch.float32)
    low = torch.where(normal, low, (value * (1 / _SPACING)).floor() * _SPACING)
    gap = torch.where(normal, (bits & _EXPONENT).view(torch.float32) * 2.0**-3, _SPACING)
    return stored(torch.where(uniform.view(scale.shape) * gap < value - low, low + gap, low))


def _count(dims: tuple[int, ...]) -> int:
    return BLOCK ** len(dims)


def _exact_sum(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Add up 16 or 256 whole numbers below 2^27 or 2^23, int32.

    Inductor's CPU code does not vectorize sums of integers; these two are of fp32, and exact.
    """
    high = (values * 2.0**-12).floor()
    low = values - high * 2.0**12
    high, low = (stored(part.sum(dims, keepdim=True)) for part in (high, low))
    return high.to(torch.int32) * 2**12 + low.to(torch.int32)
