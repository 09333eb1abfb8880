"""Element formats as data: the values of a format, and their bit patterns.

A format is a small float, an integer or any list of values. `formats` combines it with scales;
`rounding` rounds to it.
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

    The tensor is cached, because the host would wait for each copy to a GPU.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def _check_bits(name: str, bits: int) -> None:
    if not 2 <= bits <= 8:
        raise ValueError(
            f"format {name!r} has {bits} bits, but a code is stored in one byte; give 2 to 8 bits"
        )


@dataclass(frozen=True)
class FloatFormat:
    """A small binary floating-point format with sign and subnormals.

    Args:
        name: display name.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the fraction field.
        bias: exponent bias.
        max: largest finite value; codes above it are not values.

    Raises:
        ValueError: no exponent or mantissa bit, more than 8 bits, or a `max` that no code has.
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
                f"mantissa_bits={self.mantissa_bits}; give at least one of each, or list "
                "the values in a CodebookFormat"
            )
        _check_bits(self.name, self.bits)
        # Computed here, not cached on first use, which torch.compile cannot trace.
        object.__setattr__(self, "_grid", self._values())
        if self.grid[-1] != self.max:
            raise ValueError(
                f"format {self.name!r} has max={self.max}, which is not one of its values; "
                f"the next one below is {self.grid[-1]}"
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
        """Return codes (uint8) of grid values: sign, exponent, mantissa, from high to low bits."""
        magnitude = torch.bucketize(
            values.abs().contiguous(), on_device(self.grid, values.dtype, values.device)
        )
        sign = values.signbit().to(torch.uint8) << (self.bits - 1)
        # The index of NaN is past the end; any code will do, since its block scale is NaN.
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
        name: display name.
        bits: 2 to 8, including the sign.

    Raises:
        ValueError: `bits` is not 2 to 8.
    """

    name: str
    bits: int

    def __post_init__(self) -> None:
        _check_bits(self.name, self.bits)

    @property
    def mantissa_bits(self) -> int:
        """Bits below the sign and the leading bit, which make the spacing 1."""
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
        """Return the two's complement in the low bits of a uint8; the sign of zero is lost."""
        return values.nan_to_num().to(torch.int16).bitwise_and_(2**self.bits - 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return fp32 values of codes (uint8)."""
        half = 2 ** (self.bits - 1)
        return ((codes.to(torch.int16) + half) % (2 * half) - half).float()


# Formats with constant spacing in each binade: at y the spacing is `2^-mantissa_bits` times the
# power of two at or below |y|, clamped to [min_normal, max_power].
SpacedFormat: TypeAlias = FloatFormat | IntFormat


@dataclass(frozen=True)
class CodebookFormat:
    """An arbitrary list of values; the code of a value is its index in the list.

    Zero must be a value, since padding is zero. A block's amax is scaled to the largest magnitude
    in the list. If only one sign has that magnitude, elements beyond the other end of the list are
    clamped to that end.

    Args:
        name: display name.
        values: 2 to 256 finite numbers, ascending.

    Raises:
        ValueError: values that are not finite or not ascending, too few or too many, or no zero.
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
                "ascending order, including 0"
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
        """Return the indices (uint8) of codebook values; the index for NaN is arbitrary."""
        places = torch.bucketize(values.contiguous(), self.table(values.device))
        return places.clamp_(max=len(self.values) - 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the fp32 values at indices (uint8)."""
        return self.table(codes.device)[codes.long()]
