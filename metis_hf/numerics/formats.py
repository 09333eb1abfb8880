"""Block formats as data: the element values, and the scales of their blocks.

Four bits hold few values: E2M1 (2 exponent bits, 1 mantissa bit) has 0, .5, 1, 1.5, 2, 3, 4, 6 and
their negatives. A tensor fits on that grid only block by block, each block with its own scale:

    value = code * scale * global_scale

NVFP4: blocks of 16, scale in E4M3 (8 bits: 3 mantissa bits, 2^-9 to 448), and one fp32 scale for
the tensor, since E4M3 alone spans too little for gradients. 4.5 bits per element.
MXFP4: blocks of 32, scale in E8M0 (a power of two, 2^-127 to 2^127), no tensor scale. 4.25 bits.
A block's scale puts its largest magnitude (amax) at or near the largest code, 6. The more mantissa
bits the scale has, the closer it gets; the smaller the block, the fewer elements share one amax.

A format only defines which numbers exist. `rounding` rounds elements to them, `scaling` computes
the scales of blocks, and `quantize` handles whole tensors.

>>> E2M1.grid
(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
>>> NVFP4.bits_per_element, FORMATS["mxfp4"].bits_per_element
(4.5, 4.25)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from metis_hf.numerics.elements import CodebookFormat, FloatFormat, IntFormat, SpacedFormat
from metis_hf.numerics.mixed import MixedFormat

FLT_MAX = torch.finfo(torch.float32).max


PlainFormat: TypeAlias = SpacedFormat | CodebookFormat
ElementFormat: TypeAlias = PlainFormat | MixedFormat

# OCP Microscaling Formats (MX) v1.0, section 5.3; OCP 8-bit Floating Point v1.0 for the 8-bit ones.
E2M1 = FloatFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
E2M3 = FloatFormat("e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max=7.5)
E3M2 = FloatFormat("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0)
E4M3 = FloatFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0)
E5M2 = FloatFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0)
INT4_ELEMENT = IntFormat("int4", bits=4)
# Both formats have the largest value 6, so that a block has the same scale in either.
E2M1_OR_SEVENTHS = MixedFormat("e2m1|int4*6/7", (E2M1, INT4_ELEMENT), units=(1.0, 6 / 7))
# E1M2's values, 0 to 3.5 in steps of .5, are the integers to 7 divided by 2; scales absorb the 2.
E2M1_OR_E1M2 = MixedFormat("e2m1|int4", (E2M1, INT4_ELEMENT))


@dataclass(frozen=True)
class ScaleFormat:
    """The format of a block scale, and the roundings to it.

    Args:
        name: display name.
        dtype: the torch dtype that stores it.
        max: largest value.
        roundings: the supported `ScaleRounding` values; the first is the default.
        tensor_scale: whether, by default, an fp32 tensor scale extends the small range.
    """

    name: str
    dtype: torch.dtype
    max: float
    roundings: tuple[str, ...]
    tensor_scale: bool = False

    @property
    def bits(self) -> int:
        """Stored bits of one scale."""
        return 8 * self.dtype.itemsize


SCALE_E4M3 = ScaleFormat(
    "e4m3", torch.float8_e4m3fn, E4M3.max, roundings=("nearest", "up"), tensor_scale=True
)
SCALE_E8M0 = ScaleFormat("e8m0", torch.float8_e8m0fnu, 2.0**127, roundings=("floor", "up", "even"))
SCALE_FP32 = ScaleFormat("fp32", torch.float32, FLT_MAX, roundings=("nearest",))


@dataclass(frozen=True)
class BlockFormat:
    """An element format and a scale format; the elements of a block share one scale.

    Args:
        name: the name used in configs and tables.
        element: format of the values.
        scale: format of the block scale.
        block_size: elements per scale; None for one scale per row (or tensor).
        source: where the format is specified.

    Raises:
        ValueError: a block size below 1, or mixed elements under scales without a sign bit to tell
            them apart.
    """

    name: str
    element: ElementFormat
    scale: ScaleFormat
    block_size: int | None
    source: str = ""

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(
                f"format {self.name!r} has block_size={self.block_size}; give the number of "
                "elements per block, or None for one scale per row"
            )
        if isinstance(self.element, MixedFormat) and self.scale != SCALE_E4M3:
            raise ValueError(
                f"format {self.name!r} mixes two element formats under {self.scale.name} scales; "
                "use SCALE_E4M3, whose sign bit selects the element format of each block"
            )

    @property
    def bits_per_element(self) -> float:
        """Stored bits per value: the element and its share of the block scale."""
        return self.element.bits + (self.scale.bits / self.block_size if self.block_size else 0)


_MX = "OCP Microscaling Formats v1.0"
_TE = "TransformerEngine Float8CurrentScaling"

NVFP4 = BlockFormat("nvfp4", E2M1, SCALE_E4M3, 16, "NVIDIA cuBLAS; arXiv 2509.25149")
MXFP4 = BlockFormat("mxfp4", E2M1, SCALE_E8M0, 32, _MX)
MXFP6_E2M3 = BlockFormat("mxfp6-e2m3", E2M3, SCALE_E8M0, 32, _MX)
MXFP6_E3M2 = BlockFormat("mxfp6-e3m2", E3M2, SCALE_E8M0, 32, _MX)
MXFP8_E4M3 = BlockFormat("mxfp8-e4m3", E4M3, SCALE_E8M0, 32, _MX)
MXFP8_E5M2 = BlockFormat("mxfp8-e5m2", E5M2, SCALE_E8M0, 32, _MX)
FP8_E4M3 = BlockFormat("fp8-e4m3", E4M3, SCALE_FP32, None, _TE)
FP8_E5M2 = BlockFormat("fp8-e5m2", E5M2, SCALE_FP32, None, _TE)
INT4 = BlockFormat("int4", INT4_ELEMENT, SCALE_FP32, 32, "symmetric group quantization")
NVINT4 = BlockFormat("nvint4", INT4_ELEMENT, SCALE_E4M3, 16, "arXiv 2510.25602")
# E1M2 without its tensor scale; E1M2's values are the integers to 7 divided by 2.
UFP4 = BlockFormat("ufp4", INT4_ELEMENT, SCALE_FP32, 16, "arXiv 2606.20381")
IF4 = BlockFormat("if4", E2M1_OR_SEVENTHS, SCALE_E4M3, 16, "arXiv 2603.28765")
MIXFP4 = BlockFormat("mixfp4", E2M1_OR_E1M2, SCALE_E4M3, 16, "arXiv 2605.31035")

_redefinable: set[str] = set()  # names of formats that a failed import registered

FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (
        NVFP4,
        MXFP4,
        MXFP6_E2M3,
        MXFP6_E3M2,
        MXFP8_E4M3,
        MXFP8_E5M2,
        FP8_E4M3,
        FP8_E5M2,
        INT4,
        NVINT4,
        UFP4,
        IF4,
        MIXFP4,
    )
}
OWN_FORMATS = tuple(FORMATS.values())  # this package's own, without registered ones


def register_format(fmt: BlockFormat) -> BlockFormat:
    """Register a format by name, for configs, the command line and `get_format`.

    Returns:
        The format.

    Raises:
        ValueError: a different format has the name.
    """
    if fmt.name in _redefinable:
        _redefinable.remove(fmt.name)
        FORMATS[fmt.name] = fmt
    if FORMATS.setdefault(fmt.name, fmt) != fmt:
        raise ValueError(f"a format named {fmt.name!r} already exists; choose another name")
    return fmt


def let_redefine(names: Iterable[str]) -> None:
    """Allow other formats to replace those that an import registered before it failed.

    The old ones stay until then: modules of that import which succeeded do not run a second time.
    """
    _redefinable.update(names)


def get_format(fmt: str | BlockFormat) -> BlockFormat:
    """Return the format of that name; a `BlockFormat` is returned unchanged.

    Raises:
        ValueError: unknown name; the message lists the names and the closest one.
    """
    if isinstance(fmt, BlockFormat):
        return fmt
    try:
        return FORMATS[fmt]
    except (KeyError, TypeError):
        wanted = str(fmt).lower()
        near = [name for name in FORMATS if name.startswith(f"{wanted}-")]
        near = near or difflib.get_close_matches(wanted, FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"format {fmt!r} is unknown{hint} Formats: {', '.join(FORMATS)}") from None
