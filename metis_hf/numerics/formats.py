"""Number formats as data: which values exist, and how a block of them is scaled.

NVFP4 stores a tensor as E2M1 values {0, .5, 1, 1.5, 2, 3, 4, 6} with a sign, one E4M3 scale per
block of 16 values, and one fp32 scale per tensor:  value = code * scale * global_scale.
A format only says which numbers exist; how values reach them is in `rounding` and `quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class FloatFormat:
    """A small binary floating-point format with subnormals and without infinities.

    Args:
        name: for people.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the fraction field.
        bias: exponent bias.
        max: largest finite value; it says which of the top codes are values and which are NaN.
        dtype: the torch dtype that stores it, where torch has one.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    dtype: torch.dtype | None = None

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
        return 2.0 ** ((2**self.exponent_bits - 1) - self.bias)

    @cached_property
    def grid(self) -> tuple[float, ...]:
        """All values >= 0, ascending; the index of a value is its code without the sign bit."""
        values = []
        for code in range(2 ** (self.exponent_bits + self.mantissa_bits)):
            exponent, fraction = divmod(code, 2**self.mantissa_bits)
            significand = fraction + (2**self.mantissa_bits if exponent else 0)
            value = significand * self.min_subnormal * 2.0 ** max(exponent - 1, 0)
            if value <= self.max:
                values.append(value)
        return tuple(values)


# OCP Microscaling Formats (MX) v1.0, section 5.3.3, and OCP 8-bit Floating Point v1.0.
E2M1 = FloatFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
E4M3 = FloatFormat(
    "e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, dtype=torch.float8_e4m3fn
)


@dataclass(frozen=True)
class BlockFormat:
    """Elements of one format that share a scale of another, block by block.

    Args:
        name: the name used in configs and tables.
        element: format of the values.
        scale: format of the block scale.
        block_size: elements per scale.
    """

    name: str
    element: FloatFormat
    scale: FloatFormat
    block_size: int

    @property
    def bits_per_element(self) -> float:
        """Stored bits per value: the element and its share of the block scale."""
        scale_bits = 1 + self.scale.exponent_bits + self.scale.mantissa_bits
        element_bits = 1 + self.element.exponent_bits + self.element.mantissa_bits
        return element_bits + scale_bits / self.block_size


NVFP4 = BlockFormat("nvfp4", element=E2M1, scale=E4M3, block_size=16)

FORMATS: dict[str, BlockFormat] = {fmt.name: fmt for fmt in (NVFP4,)}
