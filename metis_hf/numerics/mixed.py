"""Mixed element formats: each block uses one of two formats; the sign of its scale says which.

A block scale is never negative, so the sign bit of the float that stores it is free. IF4 (arXiv
2603.28765) and MixFP4 (arXiv 2605.31035) use the bit to choose E2M1 for blocks with outliers, and
the integers up to 7 for blocks of similar magnitudes.

The functions here take every element format, so that callers need no case distinction: a plain
format behaves like a mixed one whose blocks all use the first format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metis_hf.numerics.elements import CodebookFormat, SpacedFormat


@dataclass(frozen=True)
class MixedFormat:
    """Two element formats; the sign of a block's scale says which one its codes are in.

        value = code * unit * |scale|

    A block's amax is scaled to the largest code of its format. If the largest code times the unit
    is the same in both formats, so is the magnitude of the scale.

    Args:
        name: display name.
        formats: of blocks whose scale has a clear sign bit, and of blocks whose sign bit is set.
        units: factor of the codes of each format.

    Raises:
        ValueError: the formats have different numbers of bits.
    """

    name: str
    formats: tuple[SpacedFormat, SpacedFormat]
    units: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.formats[0].bits != self.formats[1].bits:
            names = " and ".join(f"{fmt.name} ({fmt.bits} bits)" for fmt in self.formats)
            raise ValueError(
                f"mixed format {self.name!r} combines {names}; give two formats of equal width"
            )

    @property
    def bits(self) -> int:
        """Return the stored bits of one value."""
        return self.formats[0].bits

    @property
    def max(self) -> float:
        """Return the largest value of the first format, from which tensor scales are computed."""
        return self.formats[0].max * self.units[0]

    def each(self, scale: Tensor, one: Callable[[SpacedFormat], Tensor]) -> Tensor:
        """Call `one` for both formats; select each block's result by the sign of its scale."""
        first, second = map(one, self.formats)
        return torch.where(scale.signbit(), second, first)


def _by_format(scale: Tensor, first: float, second: float) -> Tensor:
    """Return `first` or `second` for each block, by the sign of its scale; fp32."""
    numbers = torch.full_like(scale, first, dtype=torch.float32)
    return torch.where(scale.signbit(), second, numbers)


def ends(element: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each block's codes * step, fp32."""
    if isinstance(element, CodebookFormat):
        return scale * element.values[0], scale * element.values[-1]
    if isinstance(element, MixedFormat):
        first, second = (fmt.max for fmt in element.formats)
        largest = steps_of(element, scale) * _by_format(scale, first, second)
    else:
        largest = scale * element.max
    return -largest, largest


def steps_of(element: Any, scale: Tensor) -> Tensor:
    """Return the step of each block, fp32: the factor of its codes, from its stored scale."""
    scale = scale.float()
    if not isinstance(element, MixedFormat):
        return scale
    return scale.abs() * _by_format(scale, *element.units)


def rounded(
    element: Any, scale: Tensor, y: Tensor, rounding: Callable[[Tensor, Any], Tensor]
) -> Tensor:
    """Clamp y, elements divided by their step, and round it to codes; may overwrite y."""
    if not isinstance(element, MixedFormat):
        return rounding(y.clamp_(-element.max, element.max), element)
    return element.each(scale, lambda fmt: rounding(y.clamp(-fmt.max, fmt.max), fmt))


def encoded(element: Any, scale: Tensor, codes: Tensor) -> Tensor:
    """Return the bit patterns (uint8) of codes; `scale` must broadcast against them."""
    if not isinstance(element, MixedFormat):
        return element.encode(codes)
    return element.each(scale, lambda fmt: fmt.encode(codes))


def decoded(element: Any, scale: Tensor, bits: Tensor) -> Tensor:
    """Return the codes, fp32, of bit patterns; `scale` must broadcast against them."""
    if not isinstance(element, MixedFormat):
        return element.decode(bits)
    return element.each(scale.float(), lambda fmt: fmt.decode(bits))
