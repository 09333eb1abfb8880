"""Elements of two formats, of which each block takes one: the sign of its scale says which.

A block scale is never negative, so the sign bit of a float that stores it is free. Formats that use
it are IF4 (arXiv 2603.28765) and MixFP4 (arXiv 2605.31035): E2M1 where a block has outliers, the
integers to 7 where its magnitudes are even.

The functions here take any element format, so that callers need not ask which kind they have: the
steps, codes and bits of one format equal a mixed one's whose blocks all take the first.
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
    """Either of two formats; what a code stands for depends on the sign of its block's scale.

        value = code * unit * |scale|

    A block's amax is scaled to the largest code of its format. Where both largest codes, times
    their units, are the same number, the two formats have one scale between them.

    Args:
        name: for people.
        formats: of blocks whose scale has no sign, and of blocks whose scale has one.
        units: what the codes of either are multiplied by.

    Raises:
        ValueError: formats of different numbers of bits.
    """

    name: str
    formats: tuple[SpacedFormat, SpacedFormat]
    units: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.formats[0].bits != self.formats[1].bits:
            names = " and ".join(f"{fmt.name} ({fmt.bits} bits)" for fmt in self.formats)
            raise ValueError(
                f"mixed format {self.name!r} is made of {names}; give two formats of equal bits"
            )

    @property
    def bits(self) -> int:
        """Return the stored bits of one value."""
        return self.formats[0].bits

    @property
    def max(self) -> float:
        """Return the largest value of the first format, which tensor scales are made for."""
        return self.formats[0].max * self.units[0]

    def each(self, scale: Tensor, one: Callable[[SpacedFormat], Tensor]) -> Tensor:
        """Apply `one` to the format of each block, which its scale says."""
        first, second = map(one, self.formats)
        return torch.where(scale.signbit(), second, first)


def _by_format(scale: Tensor, first: float, second: float) -> Tensor:
    """Return a number for the format of each block, by its scale; fp32."""
    numbers = torch.full_like(scale, first, dtype=torch.float32)
    return torch.where(scale.signbit(), second, numbers)


def ends(element: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest code times the step of each block, fp32."""
    if isinstance(element, CodebookFormat):
        return scale * element.values[0], scale * element.values[-1]
    if isinstance(element, MixedFormat):
        first, second = (fmt.max for fmt in element.formats)
        largest = steps_of(element, scale) * _by_format(scale, first, second)
    else:
        largest = scale * element.max
    return -largest, largest


def steps_of(element: Any, scale: Tensor) -> Tensor:
    """Return the factors of codes, fp32, from block scales as they are stored."""
    scale = scale.float()
    if not isinstance(element, MixedFormat):
        return scale
    return scale.abs() * _by_format(scale, *element.units)


def rounded(
    element: Any, scale: Tensor, y: Tensor, rounding: Callable[[Tensor, Any], Tensor]
) -> Tensor:
    """Clamp y, which is in units of the steps, and round it to codes; y may be overwritten."""
    if not isinstance(element, MixedFormat):
        return rounding(y.clamp_(-element.max, element.max), element)
    return element.each(scale, lambda fmt: rounding(y.clamp(-fmt.max, fmt.max), fmt))


def encoded(element: Any, scale: Tensor, codes: Tensor) -> Tensor:
    """Return the bit patterns (uint8) of codes; `scale` is broadcastable against them."""
    if not isinstance(element, MixedFormat):
        return element.encode(codes)
    return element.each(scale, lambda fmt: fmt.encode(codes))


def decoded(element: Any, scale: Tensor, bits: Tensor) -> Tensor:
    """Return the codes, fp32, of bit patterns; `scale` is broadcastable against them."""
    if not isinstance(element, MixedFormat):
        return element.decode(bits)
    return element.each(scale.float(), lambda fmt: fmt.decode(bits))
