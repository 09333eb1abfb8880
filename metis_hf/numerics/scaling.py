"""From amax to scales: the tensor scale, the block scales, and the rules that choose them.

A scale is a decode scale: value = code * scale. Each equation is evaluated in fp32, in the order
written; results are equal to TransformerEngine's to the bit only in its order.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf.numerics.formats import (
    FLT_MAX,
    SCALE_E8M0,
    SCALE_FP32,
    BlockFormat,
    CodebookFormat,
    PlainFormat,
    ScaleFormat,
    SpacedFormat,
)
from metis_hf.numerics.mixed import MixedFormat
from metis_hf.numerics.rounding import power_below, round_nearest

SCALE_NOISE = 1  # what the noise of scales is folded with: elements take the key itself
_SMALLEST_E8M0 = 2.0**-127
SMALLEST_BASE = 2.0**-12  # below, either scale is zero, or rounded up the smallest of E4M3
LARGEST_ERROR = 4.0
_BLOCK = 16  # of NVFP4, which both rules are for
LARGEST_PRODUCT = 128.0
# MS-EDEN scales amax beyond the largest code: by 1 / .93, where nearest rounding of a rotated
# tensor has the smallest error, less the 17/16 that rounding a scale down could add to that.
EDEN_CLIP = 0.93 * 17 / 16


class ScaleRounding(str, enum.Enum):
    """The rounding of a block scale to its stored format."""

    NEAREST = "nearest"  # TransformerEngine; 3.5 % of a normal tensor's elements then clip
    UP = "up"  # to the next one above: no element of the block can clip
    FLOOR = "floor"  # OCP MX: the powers of two below amax and below the largest code match
    # "floor" of an amax rounded to as many bits as a code has, halves away from zero: torchao.
    EVEN = "even"


class ScaleRule(str, enum.Enum):
    """The rule that says which code the largest magnitude of a block is scaled to."""

    ABSMAX = "absmax"  # the largest one
    FOUR_OVER_SIX = "four-over-six"  # 6 or 4, whichever gives the block the smaller squared error
    SEARCH = "search"  # the best of several in the same sense, 6 and 4 among them
    EDEN = "eden"  # a little beyond the largest; the scale is then corrected, in expectation
    UNBIASED = "unbiased"  # 16/17 of the largest: a scale rounded down does not clip it then


class OuterScale(str, enum.Enum):
    """The extent of an fp32 scale above block scales."""

    TENSOR = "tensor"
    # Each row of a tensor whose blocks lie along the rows: a token, of inputs and gradients. A GEMM
    # that contracts the rows' length has such a scale as a factor of its output's rows.
    TOKEN = "token"


# The block scale that the largest block of an NVFP4 tensor gets, where it is not the format's
# largest. Four Over Six leaves room to scale that block by another 1.5 (arXiv 2512.02010, section
# 3: 256 * 1.5 = 384 is an E4M3 value, 448 * 1.5 would saturate), MS-EDEN for its correction (arXiv
# 2601.22813).
LARGEST_SCALE = {
    ScaleRule.FOUR_OVER_SIX: 256.0,
    ScaleRule.SEARCH: 256.0,
    ScaleRule.EDEN: 256.0,
}
# An E4M3 number rounded down from between two normal ones is 16/17 of it at least: 17/16 lies
# half-way between 1 and the next one, 9/8.
UNBIASED_SHARE = 16 / 17


# The scales that are tried for a block, over the one that brings its amax to the largest code. The
# first wins a tie. Of a normal tensor the error falls from -20.4 dB to -21.2 and -21.7 dB.
TRIED_SCALES = {
    ScaleRule.FOUR_OVER_SIX: (1.0, 1.5),
    ScaleRule.SEARCH: (1.0, 0.95, 1.05, 1.4, 1.5, 1.6),
}


class TensorScale(NamedTuple):
    """The outer scale, fp32: 0-dim, or of rows in blocks [.. 1 1]; decode = 1 / encode."""

    encode: Tensor
    decode: Tensor


def encode_scale(amax: Tensor, largest: float) -> Tensor:
    """Return min(largest / amax, FLT_MAX), 1 where amax is 0: what brings amax to `largest`."""
    # Not `number / tensor`: torch computes that as reciprocal times number, two roundings.
    encode = torch.full_like(amax, largest).div_(amax).clamp_(max=FLT_MAX)
    return encode.masked_fill_(amax == 0, 1.0)


def tensor_scale(amax: Tensor, largest: float) -> TensorScale:
    """Return the scale of a whole tensor, which brings its amax to `largest`: code * block scale.

    What a rule has there is `largest_value`.
    """
    encode = encode_scale(amax, largest)
    return TensorScale(encode, encode.reciprocal())


def block_scale(
    amax: Tensor,
    fmt: BlockFormat,
    rounding: ScaleRounding,
    tensor: TensorScale | None,
    rule: ScaleRule = ScaleRule.ABSMAX,
) -> tuple[Tensor, Tensor]:
    """Return scales that bring each block's amax to the largest code, or to `largest_code`.

    Returns:
        (scale, inverse), fp32, the shape of `amax`: values of the scale format, and what the
        elements are multiplied by. NaN where amax is NaN or inf.
    """
    if fmt.scale == SCALE_FP32:
        encode = encode_scale(amax, fmt.element.max)
        scale = encode.reciprocal().clamp_(max=FLT_MAX)
        return scale.masked_fill_(~amax.isfinite(), torch.nan), encode
    if fmt.scale == SCALE_E8M0:
        assert not isinstance(fmt.element, MixedFormat)
        scale = power_below(amax).mul_(1 / fmt.element.max_power).clamp_(min=_SMALLEST_E8M0)
        scale.masked_fill_(~amax.isfinite(), torch.nan)
        if rounding is ScaleRounding.UP:
            scale = torch.where(amax > scale * fmt.element.max, scale * 2, scale)
        elif rounding is ScaleRounding.EVEN:
            assert not isinstance(fmt.element, CodebookFormat)
            scale = torch.where(amax >= scale * next_binade(fmt.element), scale * 2, scale)
        scale.clamp_(max=fmt.scale.max)  # near FLT_MAX, of a codebook that ends at 1 or below
        # The smallest scale is subnormal: zero in a process that flushes those.
        return scale, scale.reciprocal().clamp_(max=1 / _SMALLEST_E8M0)
    scale = _scale_to(largest_code(fmt, rule), amax, fmt, rounding, tensor)
    return scale, inverse_scale(scale, tensor)


def _scale_to(
    largest: float,
    amax: Tensor,
    fmt: BlockFormat,
    rounding: ScaleRounding,
    tensor: TensorScale | None,
) -> Tensor:
    """Return 8-bit scales that bring each block's amax to `largest`."""
    # One rounding after this product; (amax / 6) * S would be another number.
    to_largest = 1 / largest
    wanted = amax * (to_largest if tensor is None else tensor.encode * to_largest)
    return round_scale(wanted, fmt.scale, rounding)


def next_binade(element: SpacedFormat) -> float:
    """Return the least number that a format without an end would round to 2 * max_power.

    It is half a step below: 7 for E2M1, whose top binade has the spacing 2.
    """
    return element.max_power * (2 - 2.0 ** -(element.mantissa_bits + 1))


def inverse_scale(scale: Tensor, tensor: TensorScale | None) -> Tensor:
    """Return min(1 / (scale * decode), FLT_MAX): finite for a scale of zero."""
    decoded = scale if tensor is None else scale * tensor.decode
    return decoded.reciprocal().clamp_(max=FLT_MAX)


def round_scale(value: Tensor, fmt: ScaleFormat, rounding: ScaleRounding) -> Tensor:
    """Cast non-negative fp32 block scales to an 8-bit float (saturating) and back to fp32.

    Args:
        value: fp32 >= 0; NaN stays NaN, and inf becomes NaN rather than the largest scale.
    """
    value = value.clamp(max=fmt.max).masked_fill_(value.isinf(), torch.nan)
    cast = value.to(fmt.dtype)
    scale = cast.float()
    if rounding is ScaleRounding.UP:
        # Codes of positive floats are ordered as their values are: the next code is the next value.
        above = (cast.view(torch.uint8) + 1).view(fmt.dtype).float()
        scale = torch.where(scale < value, above, scale)
    return scale


def largest_code(fmt: BlockFormat, rule: ScaleRule) -> float:
    """Return the number that a block's amax is scaled to before the scale is rounded."""
    return fmt.element.max * _share(rule)


def _share(rule: ScaleRule) -> float:
    return UNBIASED_SHARE if rule is ScaleRule.UNBIASED else 1


def largest_value(fmt: BlockFormat, rule: ScaleRule) -> float:
    """Return the largest code times the scale that the tensor's largest block gets."""
    return largest_code(fmt, rule) * LARGEST_SCALE.get(rule, fmt.scale.max)


def least_error_scale(
    x: Tensor,
    amax: Tensor,
    dims: tuple[int, ...],
    fmt: BlockFormat,
    rounding: ScaleRounding,
    tensor: TensorScale | None,
    rule: ScaleRule = ScaleRule.FOUR_OVER_SIX,
) -> tuple[Tensor, Tensor]:
    """Give each block the scale that leaves the smallest squared error, of those that a rule tries.

    Four Over Six brings amax to 6 or to 4. A block with amax on 4 uses the values 0 .. 4 and gives
    up 6: near its top the spacing is 1/4 of the maximum instead of 1/3. Errors are measured with
    nearest rounding, also where the elements are then rounded stochastically; the first scale, 6,
    wins a tie. Scales and their order are TransformerEngine's (NVFP4 4over6); `whole_errors` adds
    the errors.

    Args:
        x: fp32 elements in blocks; `dims` are the dimensions inside a block.
        amax: of each block, broadcastable against x.
        rule: which scales are tried: `TRIED_SCALES`.

    Returns:
        (scale, inverse) as `block_scale`.
    """
    element = fmt.element
    assert not isinstance(element, MixedFormat)
    base, error_of = _errors(x, amax, dims, fmt, tensor)

    def candidate(value: Tensor) -> _Candidate:
        scale = round_scale(value, fmt.scale, rounding)
        inverse = inverse_scale(scale, tensor)
        return _Candidate(scale, inverse, error_of(element, scale, inverse))

    return _best(candidate(base * factor) for factor in TRIED_SCALES[rule])


def mixed_scale(
    x: Tensor,
    amax: Tensor,
    dims: tuple[int, ...],
    fmt: BlockFormat,
    rounding: ScaleRounding,
    tensor: TensorScale | None,
    rule: ScaleRule = ScaleRule.ABSMAX,
) -> tuple[Tensor, Tensor]:
    """Give each block the format, of two, that leaves the smaller squared error, and its scale.

    Each format has the scale that brings amax to its own largest code. Errors are measured with
    nearest rounding, also where the elements are then rounded stochastically: a choice between two
    draws would favour draws that come near, and be biased. The first format wins a tie.
    `whole_errors` adds the errors.

    Args:
        x: fp32 elements in blocks; `dims` are the dimensions inside a block.
        amax: of each block, broadcastable against x.
        fmt: its elements are a `MixedFormat`.

    Returns:
        (scale, inverse) as `block_scale`; scales have a sign where the second format is taken.
    """
    element = fmt.element
    assert isinstance(element, MixedFormat)
    _, error_of = _errors(x, amax, dims, fmt, tensor)

    def candidate(one: SpacedFormat, unit: float) -> _Candidate:
        scale = _scale_to(one.max * unit * _share(rule), amax, fmt, rounding, tensor)
        step = scale * unit
        inverse = inverse_scale(step, tensor)
        return _Candidate(scale, inverse, error_of(one, step, inverse))

    first, second = map(candidate, element.formats, element.units)
    # Spelled out: torch.compile of 2.8 does not trace into `_replace`.
    return _best([first, _Candidate(-second.scale, second.inverse, second.error)])


class _Candidate(NamedTuple):
    """A scale of each block, and the error that it leaves."""

    scale: Tensor
    inverse: Tensor
    error: Tensor  # int32


def _errors(
    x: Tensor,
    amax: Tensor,
    dims: tuple[int, ...],
    fmt: BlockFormat,
    tensor: TensorScale | None,
) -> tuple[Tensor, Callable[[PlainFormat, Tensor, Tensor], Tensor]]:
    """Return the exact scale of each block, and a function from its steps to its squared error."""
    encode = torch.ones_like(amax) if tensor is None else tensor.encode
    base = amax.div(torch.full_like(amax, fmt.element.max)).mul_(encode)  # (amax / 6) * S
    wanted = x * encode  # in units of code * scale
    to_base = base.clamp(min=SMALLEST_BASE).reciprocal_()
    count = math.prod([x.shape[dim] for dim in dims])  # dynamo traces no generator

    def error_of(element: PlainFormat, step: Tensor, inverse: Tensor) -> Tensor:
        codes = round_nearest((x * inverse).clamp_(-element.max, element.max), element)
        errors = codes.mul_(step).sub_(wanted).mul_(to_base).square_()
        return _exact_sum(whole_errors(errors, count), dims)

    return base, error_of


def _best(candidates: Iterable[_Candidate]) -> tuple[Tensor, Tensor]:
    """Return (scale, inverse) of each block's candidate of least error; the first wins a tie."""
    best, *others = candidates
    for other in others:
        better = other.error < best.error
        best = _Candidate(*(torch.where(better, new, old) for new, old in zip(other, best)))
    return best.scale, best.inverse


def whole_errors(errors: Tensor, count: int) -> Tensor:
    """Return squared errors of a block's elements as whole numbers, whose sums are exact.

    So their sum does not depend on the order of a reduction, and is the same on every device. It
    is 2^24 at most, so that fp32 adds it exactly. Errors are in units of the scale that brings amax
    to 6, where rounding is off by 1 at most. Only errors under a scale that became zero saturate:
    none leaves more.

    Args:
        errors: fp32 >= 0.
        count: elements of a block, a power of two.
    """
    return (errors.clamp(max=LARGEST_ERROR) * (2.0**24 / LARGEST_ERROR / count)).trunc()


def whole_products(products: Tensor, count: int) -> Tensor:
    """Add up products of elements in units of their scales, for MS-EDEN, in the same way.

    They are 9.1^2 at most where a scale is an E4M3 number rounded to nearest and above zero.
    """
    return (products.clamp(max=LARGEST_PRODUCT) * (2.0**30 / LARGEST_PRODUCT / count)).trunc()


def _exact_sum(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    return values.to(torch.int32).sum(dims, keepdim=True, dtype=torch.int32)


def clipping_scale(
    amax: Tensor, fmt: BlockFormat, rounding: ScaleRounding, tensor: TensorScale | None
) -> tuple[Tensor, Tensor]:
    """Return the scales that MS-EDEN quantizes with: `block_scale` for a slightly smaller amax."""
    return block_scale(amax * EDEN_CLIP, fmt, rounding, tensor)


def corrected_scale(
    scale: Tensor, y: Tensor, codes: Tensor, dims: tuple[int, ...], fmt: ScaleFormat, noise: Tensor
) -> Tensor:
    """Return MS-EDEN's scale (arXiv 2601.22813, algorithm 1): scale * <y, y> / <y, codes>, rounded.

    With that factor the projection of codes * scale on y is y itself. In a basis that is random
    enough, what is orthogonal to y averages to zero, and the quantized block is right in
    expectation although its elements are rounded to nearest. The factor is within some 10 % of 1,
    too fine for E4M3: hence the stochastic rounding.

    Args:
        scale: block scales that `y` was taken in units of, broadcastable against it.
        y: fp32 elements in units of the scales, not clamped; `dims` are inside a block.
        codes: what they were rounded to.
        fmt: of the scales, E4M3.
        noise: fp32 uniform on [0, 1), the shape of `scale`.
    """
    count = _BLOCK ** len(dims)
    energy, projection = (
        _exact_sum(whole_products(products, count), dims).float()
        for products in (y.square(), y * codes)
    )
    usable = (projection > 0) & (scale > 0)  # else every code or the scale is zero
    factor = torch.where(usable, energy / projection, torch.ones_like(scale))
    return round_scale_stochastic(scale * factor, fmt, noise)


def round_scale_stochastic(value: Tensor, fmt: ScaleFormat, noise: Tensor) -> Tensor:
    """Round non-negative fp32 block scales to one of the two nearest 8-bit floats, unbiased.

    Args:
        value: fp32 >= 0, saturated first; NaN stays NaN.
        noise: fp32 uniform on [0, 1), the shape of `value`.
    """
    value = value.clamp(max=fmt.max)
    cast = value.to(fmt.dtype)
    # Codes of positive floats are ordered as their values are.
    code = cast.view(torch.uint8)
    below = torch.where(cast.float() > value, code - 1, code)
    low = below.view(fmt.dtype).float()
    gap = (below + 1).view(fmt.dtype).float() - low  # NaN at the largest scale, which stays
    return torch.where(noise * gap < value - low, low + gap, low)
