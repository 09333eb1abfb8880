"""The reference definition of block quantization: a quantizer's options, its scales and codes.

The arithmetic is TransformerEngine's for NVFP4 (fp32, in this order; S is the encode scale):
    S     = min(448 * 6 / amax_tensor, FLT_MAX)                1 if amax_tensor is 0
    scale = e4m3(amax_block * (S * (1/6)))                     one rounding; (amax/6)*S rounds twice
    code  = e2m1(clamp(x * min(1 / (scale * (1/S)), FLT_MAX), -6, 6))
    value = (code * scale) * (1/S)                             code * scale is exact
The caller may pass amax_tensor; blocks that would need a scale above 448 are then clipped. A block
whose scale rounds to zero becomes zero. A NaN or inf turns the whole tensor into NaN; only its row
if each row has an outer scale; only its block if there is no outer scale or the caller passes
amax_tensor. Finite fp32 input never gives NaN, unless the amax passed is some 1e35 times too small.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.formats import (
    NVFP4,
    SCALE_FP32,
    BlockFormat,
    CodebookFormat,
    ElementFormat,
    get_format,
)
from metis_hf.numerics.layout import Tile, block_dims, from_blocks, to_blocks
from metis_hf.numerics.mixed import MixedFormat, ends, rounded, steps_of
from metis_hf.numerics.rounding import Rounding, round_nearest, round_stochastic
from metis_hf.numerics.scaling import (
    EDEN_CLIP,
    SCALE_NOISE,
    TRIED_SCALES,
    OuterScale,
    ScaleRounding,
    ScaleRule,
    TensorScale,
    block_scale,
    corrected_scale,
    largest_value,
    least_error_scale,
    mixed_scale,
    tensor_scale,
)

D = TypeVar("D", bound="QuantizerDefinition")


class Blocks(NamedTuple):
    """A quantized tensor, still cut into blocks.

    Block b represents codes[b] * scale[b], before the tensor scale is applied. In mixed formats the
    sign of the scale says which of two formats the codes of a block are in; see `mixed`.
    """

    codes: Tensor  # fp32 values in the element grid, padded and cut into blocks
    scale: Tensor  # fp32 values in the scale format, broadcastable against codes
    global_scale: Tensor | None  # fp32 decode scale, 0-dim or per row [.. 1]; None if one-level
    element: ElementFormat = NVFP4.element  # of the codes

    def values(self) -> Tensor:
        """Return the represented numbers; overwrites `codes`."""
        values = self.codes.mul_(steps_of(self.element, self.scale))
        return values if self.global_scale is None else values.mul_(in_blocks(self.global_scale))


@dataclass(frozen=True)
class QuantizerDefinition:
    """A quantizer's options, and the reference computation of its results.

    The subclass `quantize.Quantizer` documents the options and computes the same bits with kernels.
    Kernels accept either class.
    """

    fmt: BlockFormat = NVFP4
    rounding: Rounding = Rounding.NEAREST
    scale_rounding: ScaleRounding | None = None
    two_level: bool | None = None
    tile: Tile = Tile.ROW
    scale_rule: ScaleRule = ScaleRule.ABSMAX
    outer_scale: OuterScale = OuterScale.TENSOR

    def __post_init__(self) -> None:
        def resolve(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        resolve("fmt", get_format(self.fmt))
        if self.scale_rounding is None:
            resolve("scale_rounding", self.fmt.scale.roundings[0])
        if self.two_level is None:
            resolve("two_level", self.fmt.scale.tensor_scale)
        for name, kind in _ENUMS.items():
            resolve(name, _choice(kind, name, getattr(self, name)))
        self._check()

    def _check(self) -> None:
        fmt, scale = self.fmt, self.fmt.scale
        assert self.scale_rounding is not None
        if self.scale_rounding.value not in scale.roundings:
            raise ValueError(
                f"scale_rounding={self.scale_rounding.value!r} does not exist for {fmt.name}, "
                f"whose block scales are {scale.name}; "
                f"choose {' or '.join(repr(r) for r in scale.roundings)}"
            )
        if self.two_level and not scale.tensor_scale:
            with_tensor_scale = "nvfp4, nvint4, if4 or mixfp4"
            raise ValueError(
                f"two_level=True is not available for {fmt.name}: its {scale.name} block scales "
                f"already cover the range of fp32. Leave two_level unset, or use "
                f"{with_tensor_scale}"
            )
        if self.outer_scale is OuterScale.TOKEN and not self.two_level:
            levels = "two_level=False" if scale.tensor_scale else f"{scale.name} block scales"
            raise ValueError(
                f'outer_scale="token" gives each token a scale above its block scales, and with '
                f'{levels} {fmt.name} has none above them; use outer_scale="tensor"'
            )
        if self.outer_scale is OuterScale.TOKEN and self.tile is not Tile.ROW:
            raise ValueError(
                f'outer_scale="token" needs blocks within one token, but blocks of tile='
                f'"{self.tile.value}" span several; use tile="row" or outer_scale="tensor"'
            )
        if self.tile is Tile.SQUARE and fmt.block_size is None:
            raise ValueError(
                f'tile="square" needs a block size, but {fmt.name} has none; choose '
                'tile="row" (one scale per row) or "tensor" (one scale for the tensor)'
            )
        if self.tile is Tile.TENSOR and scale != SCALE_FP32:
            raise ValueError(
                f'tile="tensor" uses one fp32 scale for the tensor, but the scales of {fmt.name} '
                f'are {scale.name}; choose tile="row" or "square", or format fp8-e4m3 or int4'
            )
        rule, mixed = self.scale_rule, isinstance(fmt.element, MixedFormat)
        if rule in _OF_NVFP4 and fmt != NVFP4 and not (mixed and rule is ScaleRule.UNBIASED):
            raise ValueError(
                f'scale_rule="{rule.value}" {_OF_NVFP4[rule]}, but the format is {fmt.name}; '
                'use scale_rule="absmax"'
            )
        if self.scale_rounding is ScaleRounding.EVEN and isinstance(fmt.element, CodebookFormat):
            raise ValueError(
                'scale_rounding="even" rounds amax to the spacing of the largest codes, but '
                f"{fmt.name} uses a codebook, which has no fixed spacing; use "
                'scale_rounding="floor" or "up"'
            )

    def blocks(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        key: noise.Key | int | None = None,
        amax: Tensor | None = None,
    ) -> Blocks:
        """Quantize a non-empty `x` to `Blocks`; arguments as in `Quantizer.__call__`."""
        element, size = self.fmt.element, self.fmt.block_size
        dims = block_dims(self.tile, x.dim(), dim)
        x32 = to_blocks(x.detach().float(), self.tile, size, dim)
        scale, inverse, tensor = self._scales(x32, dims, amax)
        y = x32 * inverse
        eden = self.scale_rule is ScaleRule.EDEN
        round_ = round_nearest
        if self.rounding is Rounding.STOCHASTIC:
            u = to_blocks(noise.uniform(x.shape, noise.as_key(key), x.device), self.tile, size, dim)
            round_ = functools.partial(round_stochastic, noise=u)
        codes = rounded(element, scale, y.clone() if eden else y, round_)
        if eden:
            # A 1-dim shape, because noise is drawn in groups of 16 along the last dimension.
            u = noise.uniform((scale.numel(),), noise.as_key(key).fold(SCALE_NOISE), x.device)
            scale = corrected_scale(scale, y, codes, dims, self.fmt.scale, u.view(scale.shape))
        decode = None if tensor is None else tensor.decode
        return Blocks(codes, scale, decode if decode is None else of_rows(decode), element)

    def in_code_units(self, x: Tensor, *, dim: int = -1) -> Tensor:
        """Divide a non-empty `x` by its scales, fp32: the numbers that are clamped and rounded."""
        x32 = to_blocks(x.detach().float(), self.tile, self.fmt.block_size, dim)
        _, inverse, _ = self._scales(x32, block_dims(self.tile, x.dim(), dim))
        return from_blocks(x32 * inverse, x.shape, self.tile, dim)

    def _scales(
        self, x: Tensor, dims: tuple[int, ...], largest: Tensor | None = None
    ) -> tuple[Tensor, Tensor, TensorScale | None]:
        """Return (block scales, factors for the elements, tensor scale) of x cut into blocks."""
        assert self.scale_rounding is not None
        amax = x.abs().amax(dims, keepdim=True)
        tensor = None
        if self.two_level:
            if largest is not None:
                largest = largest.detach().to(x.device, torch.float32)
            elif self.outer_scale is OuterScale.TOKEN and dims == (x.dim() - 1,):
                largest = amax.amax(-2, keepdim=True)
            else:
                largest = amax.amax()
            tensor = tensor_scale(largest, largest_value(self.fmt, self.scale_rule))
        if self.scale_rule in TRIED_SCALES:
            scale, inverse = least_error_scale(
                x, amax, dims, self.fmt, self.scale_rounding, tensor, self.scale_rule
            )
        elif self.scale_rule is ScaleRule.EDEN:
            scale, inverse = block_scale(amax * EDEN_CLIP, self.fmt, self.scale_rounding, tensor)
        elif isinstance(self.fmt.element, MixedFormat):
            scale, inverse = mixed_scale(
                x, amax, dims, self.fmt, self.scale_rounding, tensor, self.scale_rule
            )
        else:
            scale, inverse = block_scale(
                amax, self.fmt, self.scale_rounding, tensor, self.scale_rule
            )
        return scale, inverse, tensor

    @property
    def needs_noise(self) -> bool:
        """Return whether the result depends on a noise key."""
        return self.rounding is Rounding.STOCHASTIC or self.scale_rule is ScaleRule.EDEN

    def deterministic(self: D) -> D:
        """Return the same quantizer without noise: elements are rounded to nearest.

        MS-EDEN, which needs noise, is replaced by Four Over Six, as in Quartet II's forward pass.
        """
        eden = self.scale_rule is ScaleRule.EDEN
        rule = ScaleRule.FOUR_OVER_SIX if eden else self.scale_rule
        return replace(self, rounding=Rounding.NEAREST, scale_rule=rule)

    def has_row_scales(self, x: Tensor, dim: int) -> bool:
        """Return whether each row of x has its own outer scale."""
        return self.outer_scale is OuterScale.TOKEN and dim % max(x.dim(), 1) == max(x.dim(), 1) - 1

    def saturated(self, x: Tensor, *, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        """Return the share of elements beyond the largest value their block can hold; 0-dim.

        With scales rounded up the share is zero (4 fp32 eps are tolerated); with scales rounded to
        nearest it is 3.5 % for normally distributed values. `amax` as in `Quantizer.__call__`. The
        scales come from `deterministic`, since MS-EDEN's contain noise.
        """
        if x.numel() == 0:
            return x.new_zeros((), dtype=torch.float32)
        x32 = to_blocks(x.detach().float(), self.tile, self.fmt.block_size, dim)
        dims = block_dims(self.tile, x.dim(), dim)
        scale, _, tensor = self.deterministic()._scales(x32, dims, amax)
        tolerance = 1 + 4 * torch.finfo(torch.float32).eps
        low, high = (end * tolerance for end in ends(self.fmt.element, scale))
        if tensor is not None:
            low, high = low * tensor.decode, high * tensor.decode
        return ((x32 < low) | (x32 > high)).sum() / x.numel()


def in_blocks(scale: Tensor) -> Tensor:
    """Reshape an outer scale, 0-dim or per row [.. 1], to broadcast against blocks."""
    return scale[..., None] if scale.dim() else scale


def of_rows(scale: Tensor) -> Tensor:
    """Invert `in_blocks`: reshape an outer scale to broadcast against the tensor."""
    return scale[..., 0] if scale.dim() else scale


_ENUMS: dict[str, type[enum.Enum]] = {
    "rounding": Rounding,
    "scale_rounding": ScaleRounding,
    "tile": Tile,
    "scale_rule": ScaleRule,
    "outer_scale": OuterScale,
}


_OF_NVFP4 = {
    **dict.fromkeys(TRIED_SCALES, "compares several scales for NVFP4 codes"),
    ScaleRule.EDEN: "corrects the E4M3 scales of NVFP4 blocks",
    ScaleRule.UNBIASED: "leaves room for rounding the E4M3 scales of NVFP4 blocks",
}


def _choice(kind: type[enum.Enum], name: str, value: object) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{name}={value!r} is unknown; choose one of {choices}") from None
