"""Rounding fp32 values onto the grid of a small float format: elements and block scales.

Everything here is exact: the spacing `step` of the grid at |y| is a power of two, so adding and
subtracting 1.5 * 2^23 * step lets the fp32 adder itself do round-to-nearest-even at that spacing.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from metis_hf.numerics.formats import FloatFormat

_FP32_EXPONENT_MASK = 0x7F800000
_FP32_MANTISSA_BITS = 23


class Rounding(str, enum.Enum):
    """How a value between two grid points is rounded."""

    NEAREST = "nearest"  # to the nearer one, ties to the even code
    STOCHASTIC = "stochastic"  # up or down with probability proportional to closeness


class ScaleRounding(str, enum.Enum):
    """How a block scale reaches its 8-bit format."""

    UP = "up"  # to the next one above: no element of the block can clip
    NEAREST = "nearest"  # TransformerEngine; 3.4 % of a normal tensor's elements then clip


def _binade(y: Tensor, fmt: FloatFormat) -> Tensor:
    """The power of two at or below |y|, held within [min_normal, max_power]; fp32, new."""
    bits = y.view(torch.int32).bitwise_and(_FP32_EXPONENT_MASK)
    return bits.view(torch.float32).clamp_(fmt.min_normal, fmt.max_power)


def round_nearest(y: Tensor, fmt: FloatFormat) -> Tensor:
    """Rounds to the nearest grid value, ties to the even code; keeps the sign of zero.

    Args:
        y: fp32, contiguous, |y| <= fmt.max (clamp before); NaN stays NaN.

    Returns:
        fp32 tensor of the same shape, values in the grid of `fmt`.
    """
    binade = _binade(y, fmt)
    # step = binade * 2^-mantissa_bits; the magic number is 1.5 * 2^23 * step.
    magic = 1.5 * 2.0 ** (_FP32_MANTISSA_BITS - fmt.mantissa_bits)
    rounded = torch.add(y, binade, alpha=magic).sub_(binade, alpha=magic)
    return rounded.copysign_(y)


def round_stochastic(y: Tensor, fmt: FloatFormat, noise: Tensor) -> Tensor:
    """Rounds to one of the two neighbouring grid values, unbiased: E[result] = y.

    The fraction of the way to the upper neighbour is exact in fp32, so a value on the grid never
    moves, and with 24-bit noise the probability of rounding up is right to 2^-24.

    Args:
        y: fp32, contiguous, |y| <= fmt.max; NaN stays NaN.
        noise: fp32 uniform on [0, 1), the shape of `y`.
    """
    step = _binade(y, fmt).mul_(2.0**-fmt.mantissa_bits)
    scaled = y.abs().div_(step)
    lower = scaled.floor()
    # ceil(fraction - noise) is 1 where noise < fraction, else 0; as floats, without a mask.
    round_up = scaled.sub_(lower).sub_(noise).ceil_()
    return lower.add_(round_up).mul_(step).copysign_(y)


def round_scale(value: Tensor, fmt: FloatFormat, rounding: ScaleRounding) -> Tensor:
    """Casts non-negative fp32 block scales to `fmt` (saturating) and back to fp32.

    Args:
        value: fp32 >= 0; NaN stays NaN, and inf becomes NaN rather than the largest scale.
    """
    assert fmt.dtype is not None
    value = value.clamp(max=fmt.max).masked_fill_(value.isinf(), torch.nan)
    cast = value.to(fmt.dtype)
    scale = cast.float()
    if rounding is ScaleRounding.UP:
        # Codes of positive floats are ordered as their values are: the next code is the next value.
        above = (cast.view(torch.uint8) + 1).view(fmt.dtype).float()
        scale = torch.where(scale < value, above, scale)
    return scale
