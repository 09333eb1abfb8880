"""Rounding of fp32 values to the grid of an element format.

In float and integer formats the spacing `step` at |y| is a power of two. Adding and subtracting
1.5 * 2^23 * step then makes the fp32 adder round to nearest even at that spacing, exactly. In a
codebook the neighbors of a value are found by binary search.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from metis_hf.numerics.formats import CodebookFormat, IntFormat, PlainFormat, SpacedFormat

_FP32_EXPONENT_MASK = 0x7F800000
_FP32_MANTISSA_BITS = 23


class Rounding(str, enum.Enum):
    """The rounding of a value between two grid points."""

    NEAREST = "nearest"  # to the nearer one, ties to the even code
    STOCHASTIC = "stochastic"  # up or down with probability proportional to closeness


def power_below(y: Tensor) -> Tensor:
    """Return the power of two at or below |y|, fp32; 0 for subnormal y, inf for inf and NaN."""
    return y.view(torch.int32).bitwise_and(_FP32_EXPONENT_MASK).view(torch.float32)


def _binade(y: Tensor, fmt: SpacedFormat) -> Tensor:
    """Return the binade of the grid at |y|: `power_below`, clamped to [min_normal, max_power]."""
    return power_below(y).clamp_(fmt.min_normal, fmt.max_power)


def _with_sign(magnitude: Tensor, y: Tensor, fmt: SpacedFormat) -> Tensor:
    """Give `magnitude` (in place) the sign of y, zeros included where the format has -0."""
    signed = magnitude.copysign_(y)
    return signed.masked_fill_(signed == 0, 0.0) if isinstance(fmt, IntFormat) else signed


def _neighbours(y: Tensor, fmt: CodebookFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the values below and above y, and y's position between them, 0 to 1.

    Beyond an end of the codebook both indices are that end. The position of NaN is NaN.
    """
    table = fmt.table(y.device)
    above = torch.bucketize(y, table).clamp_(max=len(table) - 1)
    at_or_beyond = y >= table[above]
    below = torch.where(at_or_beyond, above, (above - 1).clamp_(min=0))
    distance = (table[above] - table[below]).clamp_(min=torch.finfo(torch.float32).tiny)
    return below, above, (y - table[below]).clamp_(min=0).div_(distance).clamp_(max=1)


def _at(places: Tensor, y: Tensor, fmt: CodebookFormat) -> Tensor:
    """Return the values at `places`, NaN where y is NaN."""
    return fmt.table(y.device)[places].masked_fill_(y.isnan(), torch.nan)


def round_nearest(y: Tensor, fmt: PlainFormat) -> Tensor:
    """Round to the nearest grid value, ties to the even code.

    Float formats keep the sign of zero.

    Args:
        y: fp32, contiguous, |y| <= fmt.max (clamp before); NaN stays NaN.

    Returns:
        fp32 tensor of the same shape, values in the grid of `fmt`.
    """
    if isinstance(fmt, CodebookFormat):
        below, above, way = _neighbours(y, fmt)
        up = (way > 0.5) | ((way == 0.5) & (above % 2 == 0))
        return _at(torch.where(up, above, below), y, fmt)
    binade = _binade(y, fmt)
    # step = binade * 2^-mantissa_bits; the magic number is 1.5 * 2^23 * step.
    magic = 1.5 * 2.0 ** (_FP32_MANTISSA_BITS - fmt.mantissa_bits)
    return _with_sign(torch.add(y, binade, alpha=magic).sub_(binade, alpha=magic), y, fmt)


def round_stochastic(y: Tensor, fmt: PlainFormat, noise: Tensor) -> Tensor:
    """Round to one of the two neighboring grid values, unbiased: E[result] = y.

    A value on the grid never moves. In float and integer formats y's position between its neighbors
    is exact in fp32, so with 24-bit noise the probability of rounding up is right to 2^-24.

    Args:
        y: fp32, contiguous, |y| <= fmt.max; NaN stays NaN.
        noise: fp32 uniform on [0, 1), the shape of `y`.
    """
    if isinstance(fmt, CodebookFormat):
        below, above, way = _neighbours(y, fmt)
        return _at(torch.where(noise < way, above, below), y, fmt)
    step = _binade(y, fmt).mul_(2.0**-fmt.mantissa_bits)
    scaled = y.abs().div_(step)
    lower = scaled.floor()
    # ceil(fraction - noise) is 1 where noise < fraction, else 0; as floats, without a mask.
    round_up = scaled.sub_(lower).sub_(noise).ceil_()
    return _with_sign(lower.add_(round_up).mul_(step), y, fmt)
