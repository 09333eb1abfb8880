"""Block quantization: scales, codes, and fake quantization (quantize, then dequantize).

The arithmetic is TransformerEngine's for NVFP4 (fp32, in this order; S is the encode scale):
    S     = min(448 * 6 / amax_tensor, FLT_MAX)                1 if amax_tensor is 0
    scale = e4m3(amax_block * (S * (1/6)))                     one rounding; (amax/6)*S rounds twice
    code  = e2m1(clamp(x * min(1 / (scale * (1/S)), FLT_MAX), -6, 6))
    value = (code * scale) * (1/S)                             code * scale is exact
A block whose scale rounds to zero becomes zero. A NaN or inf makes the whole tensor NaN, or its
block where there is no tensor scale.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.formats import NVFP4, BlockFormat
from metis_hf.numerics.rounding import (
    Rounding,
    ScaleRounding,
    round_nearest,
    round_scale,
    round_stochastic,
)

_FLT_MAX = torch.finfo(torch.float32).max


class Tile(str, enum.Enum):
    """Shape of a block."""

    ROW = "row"  # 1 x block_size, along one dimension
    SQUARE = "square"  # block_size x block_size over the last two: the same blocks transposed


class Blocks(NamedTuple):
    """A quantized tensor, still laid out in blocks.

    values[b] * scale = what the codes and block scales represent, without the tensor scale.
    """

    codes: Tensor  # fp32 values in the element grid, padded and unflattened to blocks
    scale: Tensor  # fp32 values in the scale grid, broadcastable against codes
    global_scale: Tensor | None  # 0-dim fp32 decode scale, None if one-level


@dataclass(frozen=True)
class Quantizer:
    """How one tensor is quantized: format, rounding of elements and scales, levels, block shape."""

    fmt: BlockFormat = NVFP4
    rounding: Rounding = Rounding.NEAREST
    scale_rounding: ScaleRounding = ScaleRounding.NEAREST
    two_level: bool = True
    tile: Tile = Tile.ROW

    def __call__(self, x: Tensor, *, dim: int = -1, key: noise.Key | int | None = None) -> Tensor:
        """Fake-quantizes: fp32, the shape of `x`.

        Args:
            x: any shape and float dtype.
            dim: the dimension that row blocks run along; square tiles do not use it.
            key: noise key, for stochastic rounding only.
        """
        if x.numel() == 0:
            return x.float()
        blocks = self.blocks(x, dim=dim, key=key)
        values = blocks.codes.mul_(blocks.scale)
        if blocks.global_scale is not None:
            values.mul_(blocks.global_scale)
        return self._from_blocks(values, x.shape, dim)

    def unscaled(
        self, x: Tensor, *, dim: int = -1, key: noise.Key | int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Like `__call__`, with the tensor scale apart: (code * block scale, global scale).

        code * block scale has 6 significant bits at most, so bf16 holds it exactly; the product
        with the fp32 tensor scale it could not. A GEMM applies the tensor scales to its output.
        """
        if x.numel() == 0:
            return x.float(), None
        blocks = self.blocks(x, dim=dim, key=key)
        values = self._from_blocks(blocks.codes.mul_(blocks.scale), x.shape, dim)
        return values, blocks.global_scale

    def blocks(self, x: Tensor, *, dim: int = -1, key: noise.Key | int | None = None) -> Blocks:
        """Quantizes `x` (not empty), laid out in blocks."""
        fmt, block_dims = self.fmt, self._block_dims(x.dim(), dim)
        x32 = self._to_blocks(x.detach().float(), dim)
        amax = x32.abs().amax(block_dims, keepdim=True)
        if self.two_level:
            amax_tensor = amax.amax()
            # Not `number / tensor`: torch computes that as reciprocal times number, two roundings.
            encode = torch.full_like(amax_tensor, fmt.element.max * fmt.scale.max)
            encode = encode.div_(amax_tensor).clamp_(max=_FLT_MAX)
            encode.masked_fill_(amax_tensor == 0, 1.0)
            decode = encode.reciprocal()
            scale = round_scale(
                amax * (encode * (1 / fmt.element.max)), fmt.scale, self.scale_rounding
            )
            inverse = (scale * decode).reciprocal_().clamp_(max=_FLT_MAX)
        else:
            decode = None
            scale = round_scale(amax * (1 / fmt.element.max), fmt.scale, self.scale_rounding)
            inverse = scale.reciprocal().clamp_(max=_FLT_MAX)
        y = (x32 * inverse).clamp_(-fmt.element.max, fmt.element.max)
        if self.rounding is Rounding.NEAREST:
            codes = round_nearest(y, fmt.element)
        else:
            if key is None:
                raise ValueError("stochastic rounding needs a noise key; pass key=...")
            u = self._to_blocks(noise.uniform(x.shape, key, x.device), dim)
            codes = round_stochastic(y, fmt.element, u)
        return Blocks(codes, scale, decode)

    def deterministic(self) -> Quantizer:
        """The same with elements rounded to nearest."""
        return replace(self, rounding=Rounding.NEAREST)

    def saturated(self, x: Tensor, *, dim: int = -1) -> Tensor:
        """Share of elements beyond the largest value that their block can hold; 0-dim.

        Zero with scales rounded up, to the last bit of fp32; 3.4 % of normally distributed
        values with scales rounded to nearest.
        """
        blocks = self.deterministic().blocks(x, dim=dim)
        largest = blocks.scale * self.fmt.element.max
        if blocks.global_scale is not None:
            largest = largest * blocks.global_scale
        tolerance = 1 + 4 * torch.finfo(torch.float32).eps
        return (self._to_blocks(x.float(), dim).abs() > largest * tolerance).sum() / x.numel()

    def _block_dims(self, ndim: int, dim: int) -> tuple[int, ...]:
        if self.tile is Tile.SQUARE:
            return (-3, -1)
        return (dim % max(ndim, 1) + 1,)

    def _to_blocks(self, x: Tensor, dim: int) -> Tensor:
        """[.. n ..] -> [.. ceil(n/16) 16 ..], zero-padded along the blocked dimensions only."""
        size = self.fmt.block_size
        x = x.reshape(1) if x.dim() == 0 else x
        if self.tile is Tile.SQUARE:
            if x.dim() < 2:
                raise ValueError(
                    f'tile="square" needs a matrix, got shape {tuple(x.shape)}; use tile="row"'
                )
            x = F.pad(x, (0, -x.shape[-1] % size, 0, -x.shape[-2] % size))
            return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).contiguous()
        dim %= x.dim()
        pad = -x.shape[dim] % size
        if pad:
            x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, pad])
        return x.unflatten(dim, (-1, size)).contiguous()

    def _from_blocks(self, blocks: Tensor, shape: Sequence[int], dim: int) -> Tensor:
        """The inverse of `_to_blocks`: drops the padding."""
        if not shape:
            return blocks.flatten()[0]
        if self.tile is Tile.SQUARE:
            x = blocks.flatten(-4, -3).flatten(-2, -1)
            return x[..., : shape[-2], : shape[-1]]
        dim %= len(shape)
        x = blocks.flatten(dim, dim + 1)
        return x if x.shape[dim] == shape[dim] else x.narrow(dim, 0, shape[dim])


def _choice(kind: type[enum.Enum], name: str, value: str) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{name}={value!r} is unknown; choose one of {choices}") from None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, quantizer: Quantizer, dim: int, key: noise.Key | None) -> Tensor:
        return quantizer(x, dim=dim, key=key).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None, None


def fake_quantize(
    x: Tensor,
    fmt: BlockFormat = NVFP4,
    *,
    dim: int = -1,
    rounding: str = "nearest",
    scale_rounding: str = "nearest",
    two_level: bool = True,
    tile: str = "row",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Quantizes to `fmt` and back: the values that a tensor stored in four bits would have.

    Arithmetic is fp32 whatever the input. The gradient is straight-through (the identity).

    Args:
        x: any shape, any float dtype; zero-padded to whole blocks along `dim`, padding dropped.
        fmt: the block format.
        dim: the dimension along which row blocks of `fmt.block_size` run.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased).
        scale_rounding: "nearest" (TransformerEngine) or "up" (arXiv 2509.00404: never clips).
        two_level: one fp32 scale per tensor above the block scales. Without it, block scales of
            values below about 1e-2 underflow E4M3 and the tensor is lost.
        tile: "row" (1 x 16) or "square" (16 x 16 over the last two dimensions).
        generator: source of the stochastic noise; None draws from torch's default generator.

    Returns:
        Tensor of the shape and dtype of `x`. NaN or inf in `x` shows up as NaN.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: an unknown rounding, scale_rounding or tile.
    """
    if not x.is_floating_point():
        raise TypeError(f"fake_quantize needs a floating-point tensor, got {x.dtype}")
    quantizer = Quantizer(
        fmt,
        rounding=_choice(Rounding, "rounding", rounding),  # type: ignore[arg-type]
        scale_rounding=_choice(ScaleRounding, "scale_rounding", scale_rounding),  # type: ignore[arg-type]
        two_level=two_level,
        tile=_choice(Tile, "tile", tile),  # type: ignore[arg-type]
    )
    key = None
    if quantizer.rounding is Rounding.STOCHASTIC:
        key = noise.key_from_generator(generator, x.device)
    return _StraightThrough.apply(x, quantizer, dim, key)
