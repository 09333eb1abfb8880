"""From amax to scales: the tensor scale, the block scales, and the rules that choose them.

A scale is a decode scale: value = code * scale. Expressions are evaluated in fp32, in the order
written; any other order would lose bit equality with TransformerEngine.
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

SCALE_NOISE = 1  # folded into the key for the noise of scales; elements use the key itself
_SMALLEST_E8M0 = 2.0**-127
SMALLEST_BASE = 2.0**-12  # below, every candidate is zero, or rounded up the smallest E4M3 value
LARGEST_ERROR = 4.0
_BLOCK = 16  # block size of NVFP4, the only format with MS-EDEN
LARGEST_PRODUCT = 128.0
# MS-EDEN scales amax beyond the largest code: to at most 1 / .93 of it, where nearest rounding of a
# rotated tensor has the smallest error, once rounding the scale down has added up to 17/16.
EDEN_CLIP = 0.93 * 17 / 16


class ScaleRounding(str, enum.Enum):
    """The rounding of a block scale to its stored format."""

    NEAREST = "nearest"  # TransformerEngine; 3.5 % of a normal tensor's elements then clip
    UP = "up"  # to the next value above: no element of the block can clip
    FLOOR = "floor"  # OCP MX: power of two <= amax / power of two <= the largest code
    # torchao: "floor" of an amax rounded to the precision of a code, halves away from zero.
    EVEN = "even"


class ScaleRule(str, enum.Enum):
    """The rule for the code to which a block's largest magnitude is scaled."""

    ABSMAX = "absmax"  # the largest code
    FOUR_OVER_SIX = "four-over-six"  # 6 or 4, whichever gives the block the smaller squared error
    SEARCH = "search"  # the one of six with the smallest squared error, 6 and 4 among them
    EDEN = "eden"  # slightly beyond the largest code; the scale is then corrected in expectation
    UNBIASED = "unbiased"  # 16/17 of the largest code: a scale rounded down does not clip amax


class OuterScale(str, enum.Enum):
    """The part of a tensor that shares one fp32 scale above its block scales."""

    TENSOR = "tensor"
    # Each row of a tensor whose blocks lie along the rows; in inputs and gradients a row is a
    # token. A GEMM that contracts the rows' length applies the scale to the rows of its output.
    TOKEN = "token"


# The scale of the largest block of an NVFP4 tensor, for rules that do not use the format's largest
# scale. Four Over Six leaves room to multiply the scale by 1.5 (arXiv 2512.02010, section 3:
# 256 * 1.5 = 384 is an E4M3 value, 448 * 1.5 would saturate); MS-EDEN leaves room for its
# correction (arXiv 2601.22813).
LARGEST_SCALE = {
    ScaleRule.FOUR_OVER_SIX: 256.0,
    ScaleRule.SEARCH: 256.0,
    ScaleRule.EDEN: 256.0,
}
# A number rounded to the nearest normal E4M3 value becomes at least 16/17 of itself: the worst case
# is 17/16, halfway between 1 and 9/8.
UNBIASED_SHARE = 16 / 17


# Candidate scales of a block, as factors of the scale that brings its amax to the largest code. The
# first wins a tie. The error of a normal tensor falls from -20.4 dB to -21.2 and -21.7 dB.
# From .92 to 1.68; otherwise `least_error` in cpu.cpp must clamp in all cases.
TRIED_SCALES = {
    ScaleRule.FOUR_OVER_SIX: (1.0, 1.5),
    ScaleRule.SEARCH: (1.0, 0.95, 1.05, 1.4, 1.5, 1.6),
}


class TensorScale(NamedTuple):
    """The outer scale, fp32: 0-dim, or per row in blocks [.. 1 1]; decode = 1 / encode."""

    encode: Tensor
    decode: Tensor


def encode_scale(amax: Tensor, largest: float) -> Tensor:
    """Return the factor that brings amax to `largest`, at most FLT_MAX; 1 where amax is 0."""
    # Not `number / tensor`: torch computes that as reciprocal times number, two roundings.
    encode = torch.full_like(amax, largest).div_(amax).clamp_(max=FLT_MAX)
    return encode.masked_fill_(amax == 0, 1.0)


def tensor_scale(amax: Tensor, largest: float) -> TensorScale:
    """Return the outer scale that brings amax to `largest`, in units of code * block scale.

    `largest_value` gives `largest` for each rule.
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
    """Return scales that bring each block's amax to the largest code.

    With E4M3 scales the target is `largest_code`, which depends on the rule.

    Returns:
        (scale, inverse), fp32, the shape of `amax`: values of the scale format, and the factors for
        the elements. Scales are NaN where amax is NaN or inf.
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
        scale.clamp_(max=fmt.scale.max)  # for amax near FLT_MAX and a codebook's max of 1 or less
        # The smallest scale is subnormal, hence zero in a process that flushes subnormals.
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
    # (amax / 6) * S would round differently.
    to_largest = 1 / largest
    wanted = amax * (to_largest if tensor is None else tensor.encode * to_largest)
    return round_scale(wanted, fmt.scale, rounding)


def next_binade(element: SpacedFormat) -> float:
    """Return the smallest number that the format, if unbounded, would round to 2 * max_power.

    The number is half a step below 2 * max_power: 7 for E2M1, whose top binade has the spacing 2.
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
    """Return the number to which a block's amax is scaled, before the scale is rounded."""
    return fmt.element.max * _share(rule)


def _share(rule: ScaleRule) -> float:
    return UNBIASED_SHARE if rule is ScaleRule.UNBIASED else 1


def largest_value(fmt: BlockFormat, rule: ScaleRule) -> float:
    """Return `largest_code` times the scale of the tensor's largest block."""
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
    """Return, for each block, the candidate scale with the smallest squared error.

    Four Over Six scales amax to 6 or to 4. A block with amax at 4 uses the values 0 .. 4 and gives
    up 6; near its top the spacing is then 1/4 of the maximum instead of 1/3. Errors are measured
    with nearest rounding, even if the elements are then rounded stochastically; the first
    candidate, 6, wins a tie. Candidates and their order are TransformerEngine's (NVFP4 4over6).
    Errors are added exactly; see `whole_errors`.

    Args:
        x: fp32 elements in blocks; `dims` are the dimensions inside a block.
        amax: largest magnitude of each block, broadcastable against x.
        rule: selects the candidates in `TRIED_SCALES`.

    Returns:
        (scale, inverse) as in `block_scale`.
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
    """Return, for each block, the scale in the format with the smaller squared error.

    In each format the scale brings amax to the format's largest code. Errors are measured with
    nearest rounding, even if the elements are then rounded stochastically: choosing between two
    random draws would favor draws close to the input and so be biased. The first format wins a tie.
    Errors are added exactly; see `whole_errors`.

    Args:
        x: fp32 elements in blocks; `dims` are the dimensions inside a block.
        amax: largest magnitude of each block, broadcastable against x.
        fmt: a block format whose elements are a `MixedFormat`.

    Returns:
        (scale, inverse) as in `block_scale`; scales are negative for blocks in the second format.
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
    # Not `_replace`: torch.compile in torch 2.8 cannot trace it.
    return _best([first, _Candidate(-second.scale, second.inverse, second.error)])


class _Candidate(NamedTuple):
    """One candidate scale per block, and its squared error."""

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
    """Return each block's scale before rounding, and a function that computes squared errors."""
    encode = torch.ones_like(amax) if tensor is None else tensor.encode
    base = amax.div(torch.full_like(amax, fmt.element.max)).mul_(encode)  # (amax / 6) * S
    wanted = x * encode  # in units of code * scale
    to_base = base.clamp(min=SMALLEST_BASE).reciprocal_()
    count = math.prod([x.shape[dim] for dim in dims])  # a list: dynamo cannot trace a generator

    def error_of(element: PlainFormat, step: Tensor, inverse: Tensor) -> Tensor:
        codes = round_nearest((x * inverse).clamp_(-element.max, element.max), element)
        errors = codes.mul_(step).sub_(wanted).mul_(to_base).square_()
        return _exact_sum(whole_errors(errors, count), dims)

    return base, error_of


def _best(candidates: Iterable[_Candidate]) -> tuple[Tensor, Tensor]:
    """Return (scale, inverse) of each block's least-error candidate; the first wins a tie."""
    best, *others = candidates
    for other in others:
        better = other.error < best.error
        best = _Candidate(*(torch.where(better, new, old) for new, old in zip(other, best)))
    return best.scale, best.inverse


def whole_errors(errors: Tensor, count: int) -> Tensor:
    """Convert squared errors of a block's elements to whole numbers, whose sum is exact.

    The sum is therefore the same in any order of reduction and on every device. It is at most 2^24,
    so that fp32 can hold it. Errors are in units of the scale that brings amax to 6; in these units
    rounding is off by at most 1. Errors saturate only under a scale that rounded to zero, which
    leaves the largest error anyway.

    Args:
        errors: fp32 >= 0.
        count: elements of a block, a power of two.
    """
    return (errors.clamp(max=LARGEST_ERROR) * (2.0**24 / LARGEST_ERROR / count)).trunc()


def whole_products(products: Tensor, count: int) -> Tensor:
    """Convert products of elements, in units of their scales, to whole numbers, for MS-EDEN.

    See `whole_errors`. A product is at most 9.1^2 if its scale was rounded to nearest and is above
    zero.
    """
    return (products.clamp(max=LARGEST_PRODUCT) * (2.0**30 / LARGEST_PRODUCT / count)).trunc()


def _exact_sum(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    return values.to(torch.int32).sum(dims, keepdim=True, dtype=torch.int32)


def corrected_scale(
    scale: Tensor, y: Tensor, codes: Tensor, dims: tuple[int, ...], fmt: ScaleFormat, noise: Tensor
) -> Tensor:
    """Return MS-EDEN's scale (arXiv 2601.22813, algorithm 1): scale * <y, y> / <y, codes>, rounded.

    With this factor the quantized block, projected onto the original one, equals the original. In a
    sufficiently random basis the component orthogonal to the original averages to zero, so the
    quantized block is unbiased although its elements are rounded to nearest. The factor is within
    about 10 % of 1, too fine for E4M3; the scale is therefore rounded stochastically.

    Args:
        scale: block scales by which `y` was divided, broadcastable against it.
        y: fp32 elements in units of the scales, not clamped; `dims` are inside a block.
        codes: `y` rounded to nearest.
        fmt: format of the scales, E4M3.
        noise: fp32 uniform on [0, 1), the shape of `scale`.
    """
    count = _BLOCK ** len(dims)
    energy, projection = (
        _exact_sum(whole_products(products, count), dims).float()
        for products in (y.square(), y * codes)
    )
    usable = (projection > 0) & (scale > 0)  # else all codes or the scale are zero
    factor = torch.where(usable, energy / projection, torch.ones_like(scale))
    return round_scale_stochastic(scale * factor, fmt, noise)


def round_scale_stochastic(value: Tensor, fmt: ScaleFormat, noise: Tensor) -> Tensor:
    """Round non-negative fp32 block scales stochastically to an 8-bit float, unbiased.

    Args:
        value: fp32 >= 0; saturates at the largest scale; NaN stays NaN.
        noise: fp32 uniform on [0, 1), the shape of `value`.
    """
    value = value.clamp(max=fmt.max)
    cast = value.to(fmt.dtype)
    # Codes of positive floats are ordered as their values are.
    code = cast.view(torch.uint8)
    below = torch.where(cast.float() > value, code - 1, code)
    low = below.view(fmt.dtype).float()
    gap = (below + 1).view(fmt.dtype).float() - low  # NaN at the largest scale, so that it stays
    return torch.where(noise * gap < value - low, low + gap, low)
