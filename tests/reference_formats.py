"""The scalar half of the reference: which numbers exist, and how one number is cast to them.

Imports nothing of metis_hf and uses no float8/float6/float4 cast of any library. Grids are
enumerated from their definitions: OCP Microscaling Formats (MX) v1.0 for E2M1, E2M3, E3M2 and
E8M0, OCP 8-bit Floating Point v1.0 for E4M3 and E5M2.
"""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
E8M0_MIN_EXPONENT, E8M0_MAX_EXPONENT = -127, 127

ScaleRounding = Literal["nearest", "up", "floor", "even"]


def _enumerate_float(exponent_bits: int, mantissa_bits: int, bias: int) -> list[float]:
    """Every value >= 0 of a code without special values, in the order of the codes."""
    grid = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            if exponent == 0:
                grid.append(fraction * 2.0 ** (1 - bias))
            else:
                grid.append((1 + fraction) * 2.0 ** (exponent - bias))
    return grid


class Element(NamedTuple):
    """Values >= 0 of a format; the list index is the bit pattern without the sign.

    The parity of an index is therefore the parity of the code, which decides ties.
    """

    grid: list[float]
    signed_zero: bool = True

    @property
    def max(self) -> float:
        return self.grid[-1]


E2M1_GRID: list[float] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3_GRID: list[float] = _enumerate_float(4, 3, 7)[:-1]  # exponent 15 mantissa 7 is NaN
E4M3_MAX = E4M3_GRID[-1]

ELEMENTS: dict[str, Element] = {
    "e2m1": Element(E2M1_GRID),
    "e2m3": Element(_enumerate_float(2, 3, 1)),
    "e3m2": Element(_enumerate_float(3, 2, 3)),
    "e4m3": Element(E4M3_GRID),
    "e5m2": Element(_enumerate_float(5, 2, 15)[:-4]),  # exponent 31 is infinity and NaN
    "int4": Element([float(value) for value in range(8)], signed_zero=False),
}


class Format(NamedTuple):
    """An element format, the format of the scales, and the elements per scale (None: a row).

    A block may take another element format instead, in units of a number of scales.
    """

    element: Element
    scale: Literal["e4m3", "e8m0", "fp32"]
    block: int | None
    other: tuple[Element, float] | None = None


FORMATS: dict[str, Format] = {
    "nvfp4": Format(ELEMENTS["e2m1"], "e4m3", 16),
    "mxfp4": Format(ELEMENTS["e2m1"], "e8m0", 32),
    "mxfp6-e2m3": Format(ELEMENTS["e2m3"], "e8m0", 32),
    "mxfp6-e3m2": Format(ELEMENTS["e3m2"], "e8m0", 32),
    "mxfp8-e4m3": Format(ELEMENTS["e4m3"], "e8m0", 32),
    "mxfp8-e5m2": Format(ELEMENTS["e5m2"], "e8m0", 32),
    "fp8-e4m3": Format(ELEMENTS["e4m3"], "fp32", None),
    "fp8-e5m2": Format(ELEMENTS["e5m2"], "fp32", None),
    "int4": Format(ELEMENTS["int4"], "fp32", 32),
    "nvint4": Format(ELEMENTS["int4"], "e4m3", 16),
    "ufp4": Format(ELEMENTS["int4"], "fp32", 16),
    "if4": Format(ELEMENTS["e2m1"], "e4m3", 16, (ELEMENTS["int4"], 6 / 7)),
    "mixfp4": Format(ELEMENTS["e2m1"], "e4m3", 16, (ELEMENTS["int4"], 1.0)),
}


def midpoints(grid: list[float]) -> list[float]:
    """The ties of nearest rounding: the middle of each pair of neighbours (exact in float64)."""
    return [(low + high) / 2 for low, high in itertools.pairwise(grid)]


_MIDPOINTS = {tuple(element.grid): midpoints(element.grid) for element in ELEMENTS.values()}


def _nearest_even(magnitude: float, grid: list[float]) -> float:
    """Nearest grid point of a value >= 0, ties to the even code, saturating at the last point.

    Compares with the midpoints, which float64 holds exactly, rather than comparing two distances,
    which it would have to round for subnormal values.
    """
    middles = _MIDPOINTS[tuple(grid)]
    index = bisect.bisect_left(middles, magnitude)  # middles[index - 1] < magnitude
    if index < len(middles) and magnitude == middles[index] and index % 2 == 1:
        return grid[index + 1]
    return grid[index]


def element_nearest(value: float, element: Element) -> np.float32:
    """Nearest value of `element`, ties to even, saturating; the sign of zero is kept if it has one.

    NaN stays NaN.
    """
    value = float(value)
    if math.isnan(value):
        return F32(math.nan)
    rounded = math.copysign(_nearest_even(abs(value), element.grid), value)
    return F32(rounded if rounded or element.signed_zero else 0.0)


def e2m1_nearest(value: float) -> np.float32:
    """E2M1 value nearest to `value`, ties to even, saturating at 6; the sign of zero is kept."""
    return element_nearest(value, ELEMENTS["e2m1"])


def e4m3_nearest(value: float) -> np.float32:
    """E4M3 value nearest to `value`, ties to even, saturating at 448.

    An infinity becomes NaN, not 448: an overflow upstream has to stay visible.
    """
    value = float(value)
    if not math.isfinite(value):
        return F32(math.nan)
    return F32(math.copysign(_nearest_even(abs(value), E4M3_GRID), value))


def e4m3_up(value: float) -> np.float32:
    """The smallest E4M3 value >= `value` for `value` >= 0, saturating at 448; infinity is NaN."""
    value = float(value)
    if not math.isfinite(value):
        return F32(math.nan)
    for point in E4M3_GRID:
        if point >= value:
            return F32(point)
    return F32(E4M3_MAX)


def floor_log2(value: Fraction) -> int:
    """The largest integer e with 2^e <= value, for value > 0, by comparing integers."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def ceil_log2(value: Fraction) -> int:
    """The smallest integer e with value <= 2^e, for value > 0."""
    return -floor_log2(1 / value)


def e8m0_exponent(
    amax: float, largest: float, rounding: ScaleRounding, spacing: float | None = None
) -> int:
    """Exponent of the power-of-two scale of a block, in exact arithmetic.

    "floor" is OCP MX section 6.3: the largest power of two in the block over the largest power of
    two of the element format. "up" is the smallest power of two with which nothing clips. "even" is
    "floor" of amax rounded to the nearest code of that spacing, halves away from zero: it may round
    to a power of two beyond the codes.

    Args:
        amax: finite, >= 0.
        largest: largest value of the element format.
        spacing: of its largest values, for "even".
    """
    if amax == 0:
        return E8M0_MIN_EXPONENT
    top = floor_log2(Fraction(largest))
    if rounding in ("floor", "even"):
        exponent = max(floor_log2(Fraction(float(amax))) - top, E8M0_MIN_EXPONENT)
        if rounding == "even":
            steps = Fraction(float(amax)) / Fraction(2) ** exponent / Fraction(spacing)
            exponent += math.floor(steps + Fraction(1, 2)) * Fraction(spacing) >= 2 ** (top + 1)
    else:
        exponent = ceil_log2(Fraction(float(amax)) / Fraction(largest))
    return min(max(exponent, E8M0_MIN_EXPONENT), E8M0_MAX_EXPONENT)


def neighbours(value: float, element: Element) -> tuple[float, float, float]:
    """What stochastic rounding of `value` may give: (toward zero, away from zero, P(away)).

    Clamps to the range first. The expectation toward + P * (away - toward) is the clamped value. A
    value on the grid gives itself twice, with probability 0.
    """
    value = float(value)
    magnitude = min(abs(value), element.max)
    for low, high in itertools.pairwise(element.grid):
        if low <= magnitude < high:
            probability = (magnitude - low) / (high - low)
            if probability == 0.0:
                high = low
            return math.copysign(low, value), math.copysign(high, value), probability
    top = math.copysign(element.max, value)
    return top, top, 0.0
