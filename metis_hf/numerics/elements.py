"""Number formats of elements as data: which values exist, and which bits stand for them.

A grid is a small float's, the integers', or any list of values. What scales do to it is in
`formats`; how values reach it in `rounding`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from metis_hf.noise import constant


@constant
def on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor [n]; do not write to it.

    It is kept: the host would wait for each copy to a GPU.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def _check_bits(name: str, bits: int) -> None:
    """Refuse a size that codes are not stored in."""
    if not 2 <= bits <= 8:
        raise ValueError(
            f"format {name!r} has {bits} bits, and codes are stored in bytes; give 2 to 8 bits"
        )


@dataclass(frozen=True)
class FloatFormat:
    """A small binary floating-point format with sign and subnormals.

    Args:
        name: for people.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the fraction field.
        bias: exponent bias.
        max: largest finite value; it says which of the top codes are values and which are not.

    Raises:
        ValueError: no bit of exponent or fraction, more than 8 bits, or a `max` that no code has.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float

    def __post_init__(self) -> None:
        if self.exponent_bits < 1 or self.mantissa_bits < 1:
            raise ValueError(
                f"format {self.name!r} has exponent_bits={self.exponent_bits} and "
                f"mantissa_bits={self.mantissa_bits}; give one of each at least, or list the "
                "values in a CodebookFormat"
            )
        _check_bits(self.name, self.bits)
        # Not when it is first asked for: torch.compile does not trace what caches values.
        object.__setattr__(self, "_grid", self._values())
        if self.grid[-1] != self.max:
            raise ValueError(
                f"format {self.name!r} has max={self.max}, which is none of its values; the next "
                f"one below is {self.grid[-1]}"
            )

    @property
    def bits(self) -> int:
        """Stored bits of one value."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_normal(self) -> float:
        """Smallest normal value; below it the spacing is constant."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value: the spacing around zero."""
        return self.min_normal * 2.0**-self.mantissa_bits

    @property
    def max_power(self) -> float:
        """Largest power of two that is not above `max`: the top binade."""
        return 2.0 ** (math.frexp(self.max)[1] - 1)

    @property
    def grid(self) -> tuple[float, ...]:
        """Return all values >= 0, ascending; the index of a value is its code without the sign."""
        return self._grid  # type: ignore[attr-defined, no-any-return]

    def _values(self) -> tuple[float, ...]:
        values = []
        for code in range(2 ** (self.exponent_bits + self.mantissa_bits)):
            exponent, fraction = divmod(code, 2**self.mantissa_bits)
            significand = fraction + (2**self.mantissa_bits if exponent else 0)
            value = significand * self.min_subnormal * 2.0 ** max(exponent - 1, 0)
            if value <= self.max:
                values.append(value)
        return tuple(values)

    def encode(self, values: Tensor) -> Tensor:
        """Return sign bit, exponent, mantissa, from the high bit down, in a uint8's low bits."""
        magnitude = torch.bucketize(
            values.abs().contiguous(), on_device(self.grid, values.dtype, values.device)
        )
        sign = values.signbit().to(torch.uint8) << (self.bits - 1)
        # NaN falls off the grid's end; its block scale says what it was.
        return magnitude.clamp_(max=len(self.grid) - 1).to(torch.uint8) | sign

    def decode(self, codes: Tensor) -> Tensor:
        """Return fp32 values of codes (uint8)."""
        grid = on_device(self.grid, torch.float32, codes.device)
        table = grid.new_full((2 ** (self.bits - 1),), torch.nan)
        table[: len(grid)] = grid
        return torch.cat([table, -table])[codes.long()]


@dataclass(frozen=True)
class IntFormat:
    """Symmetric two's complement integers; the most negative code is not used.

    Args:
        name: for people.
        bits: 2 to 8, with the sign.

    Raises:
        ValueError: another number of bits.
    """

    name: str
    bits: int

    def __post_init__(self) -> None:
        _check_bits(self.name, self.bits)

    @property
    def mantissa_bits(self) -> int:
        """Return a value as if the sign and the leading bit were apart: the spacing is 1."""
        return self.bits - 2

    @property
    def min_normal(self) -> float:
        return 2.0 ** (self.bits - 2)

    @property
    def max_power(self) -> float:
        return self.min_normal

    @property
    def max(self) -> float:
        return 2.0 ** (self.bits - 1) - 1

    @property
    def grid(self) -> tuple[float, ...]:
        return tuple(float(value) for value in range(2 ** (self.bits - 1)))

    def encode(self, values: Tensor) -> Tensor:
        """Return the two's complement in the low bits of a uint8. The sign of a zero is lost."""
        return values.nan_to_num().to(torch.int16).bitwise_and_(2**self.bits - 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return fp32 values of codes (uint8)."""
        half = 2 ** (self.bits - 1)
        return ((codes.to(torch.int16) + half) % (2 * half) - half).float()


# Constant spacing inside a power of two: at y it is `2^-mantissa_bits` times the power of two at or
# below |y|, that power held within [min_normal, max_power].
SpacedFormat: TypeAlias = FloatFormat | IntFormat


@dataclass(frozen=True)
class CodebookFormat:
    """Any values at all: the code of a value is its place in the list.

    Zero must be a value, since padding is zero. The largest magnitude is what a block's amax is
    scaled to; it may have one sign only, and what lies beyond the other end becomes that end.

    Args:
        name: for people.
        values: ascending, at most 256.

    Raises:
        ValueError: values that are not ascending, too many, or without zero.
    """

    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(float(value) for value in self.values))
        ascending = all(a < b for a, b in zip(self.values, self.values[1:]))
        finite = all(map(math.isfinite, self.values))
        if not (ascending and finite and 2 <= len(self.values) <= 256 and 0.0 in self.values):
            raise ValueError(
                f"codebook {self.name!r} has values {self.values}; give 2 to 256 finite numbers in "
                "ascending order, 0 among them"
            )

    @property
    def bits(self) -> int:
        """Return the stored bits of one value."""
        return (len(self.values) - 1).bit_length()

    @property
    def max(self) -> float:
        return max(-self.values[0], self.values[-1])

    @property
    def max_power(self) -> float:
        """Return the largest power of two that is not above `max`."""
        return 2.0 ** (math.frexp(self.max)[1] - 1)

    def table(self, device: torch.device) -> Tensor:
        """Return the values as fp32."""
        return on_device(self.values, torch.float32, device)

    def encode(self, values: Tensor) -> Tensor:
        """Return the places (uint8) of values of the codebook; arbitrary ones of NaN."""
        places = torch.bucketize(values.contiguous(), self.table(values.device))
        return places.clamp_(max=len(self.values) - 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the fp32 values at places (uint8)."""
        return self.table(codes.device)[codes.long()]
