"""Block quantization of whole tensors: scales, codes, and fake quantization (there and back).

The arithmetic is TransformerEngine's for NVFP4 (fp32, in this order; S is the encode scale):
    S     = min(448 * 6 / amax_tensor, FLT_MAX)                1 if amax_tensor is 0
    scale = e4m3(amax_block * (S * (1/6)))                     one rounding; (amax/6)*S rounds twice
    code  = e2m1(clamp(x * min(1 / (scale * (1/S)), FLT_MAX), -6, 6))
    value = (code * scale) * (1/S)                             code * scale is exact
A block whose scale rounds to zero becomes zero. A NaN or inf makes the whole tensor NaN, or its
block where there is no tensor scale. Nothing finite gives NaN.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics import kernels
from metis_hf.numerics.formats import (
    NVFP4,
    SCALE_FP32,
    BlockFormat,
    get_format,
)
from metis_hf.numerics.layout import Tile, block_dims, from_blocks, to_blocks
from metis_hf.numerics.rounding import Rounding, round_nearest, round_stochastic
from metis_hf.numerics.scaling import (
    SCALE_NOISE,
    ScaleRounding,
    ScaleRule,
    TensorScale,
    block_scale,
    clipping_scale,
    corrected_scale,
    four_over_six,
    largest_scale,
    tensor_scale,
)


class Blocks(NamedTuple):
    """A quantized tensor, still laid out in blocks.

    codes[b] * scale[b] is what codes and block scales represent, without the tensor scale.
    """

    codes: Tensor  # fp32 values in the element grid, padded and cut into blocks
    scale: Tensor  # fp32 values in the scale format, broadcastable against codes
    global_scale: Tensor | None  # 0-dim fp32 decode scale, None if one-level

    def values(self) -> Tensor:
        """The represented numbers, in place of the codes."""
        values = self.codes.mul_(self.scale)
        return values if self.global_scale is None else values.mul_(self.global_scale)


@dataclass(frozen=True)
class Quantizer:
    """How one tensor is quantized.

    Args:
        fmt: the block format, or its name.
        rounding: of elements.
        scale_rounding: of block scales; None takes the format's default.
        two_level: one fp32 scale per tensor above the block scales; None: if the format has one.
        tile: shape of a block.
        scale_rule: which code the largest magnitude of a block is scaled to.

    Raises:
        ValueError: choices that do not exist, or not together; the message says which do.
    """

    fmt: BlockFormat = NVFP4
    rounding: Rounding = Rounding.NEAREST
    scale_rounding: ScaleRounding | None = None
    two_level: bool | None = None
    tile: Tile = Tile.ROW
    scale_rule: ScaleRule = ScaleRule.ABSMAX

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
            with_tensor_scale = "nvfp4 or nvint4"
            raise ValueError(
                f"two_level=True does not exist for {fmt.name}: its {scale.name} block scales span "
                f"the range of fp32 alone. Leave two_level unset, or use {with_tensor_scale}"
            )
        if self.tile is Tile.SQUARE and fmt.block_size is None:
            raise ValueError(
                f'tile="square" needs a block size, and {fmt.name} has none; '
                'choose tile="row" (one scale per row) or "tensor" (one scale)'
            )
        if self.tile is Tile.TENSOR and scale != SCALE_FP32:
            raise ValueError(
                f'tile="tensor" is one fp32 scale for all, and the scales of {fmt.name} are '
                f'{scale.name}; choose tile="row" or "square", or format fp8-e4m3 or int4'
            )
        if self.scale_rule is ScaleRule.FOUR_OVER_SIX and fmt != NVFP4:
            raise ValueError(
                f'scale_rule="four-over-six" chooses between the NVFP4 codes 4 and 6, '
                f'and the format is {fmt.name}; use scale_rule="absmax"'
            )
        if self.scale_rule is ScaleRule.EDEN and fmt != NVFP4:
            raise ValueError(
                f'scale_rule="eden" corrects E4M3 scales of NVFP4 blocks, '
                f'and the format is {fmt.name}; use scale_rule="absmax"'
            )

    def __call__(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        key: noise.Key | int | None = None,
        dtype: torch.dtype = torch.float32,
        minus: Tensor | None = None,
        plus: Tensor | None = None,
    ) -> Tensor:
        """Fake-quantizes: the shape of `x`, rounded from fp32 to `dtype` at the end.

        With `minus` and `plus` it is plus + Q(x - minus), in the same passes over memory.

        Args:
            x: any shape and float dtype.
            dim: the dimension that row blocks run along; other tiles do not use it.
            key: noise key, where `needs_noise`.
            dtype: of the result.
            minus: of the shape of `x`, fp32 (fp64): taken off before.
            plus: the same, added after.
        """
        if x.numel() == 0:
            return x.to(dtype)
        return kernels.fake_quantize(
            x, self, dim=dim, key=key, dtype=dtype, minus=minus, plus=plus
        )[0]

    def unscaled(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        key: noise.Key | int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor | None]:
        """Like `__call__`, with the tensor scale apart: (code * block scale, global scale).

        For 4-bit elements code * block scale has 7 significant bits at most, so bf16 holds it
        exactly; the product with the fp32 tensor scale it could not. A GEMM applies the tensor
        scales to its output.
        """
        if x.numel() == 0:
            return x.to(dtype), None
        return kernels.fake_quantize(x, self, dim=dim, key=key, dtype=dtype, scaled=False)

    def blocks(self, x: Tensor, *, dim: int = -1, key: noise.Key | int | None = None) -> Blocks:
        """Quantizes `x` (not empty), laid out in blocks."""
        element, size = self.fmt.element, self.fmt.block_size
        dims = block_dims(self.tile, x.dim(), dim)
        x32 = to_blocks(x.detach().float(), self.tile, size, dim)
        scale, inverse, tensor = self._scales(x32, dims)
        y = x32 * inverse
        eden = self.scale_rule is ScaleRule.EDEN
        limits = -element.max, element.max
        inside = y.clamp(*limits) if eden else y.clamp_(*limits)
        if self.rounding is Rounding.NEAREST:
            codes = round_nearest(inside, element)
        else:
            u = to_blocks(noise.uniform(x.shape, noise.as_key(key), x.device), self.tile, size, dim)
            codes = round_stochastic(inside, element, u)
        if eden:
            # One dimension: noise is drawn in groups of 16 along the last one.
            u = noise.uniform((scale.numel(),), noise.as_key(key).fold(SCALE_NOISE), x.device)
            scale = corrected_scale(scale, y, codes, dims, self.fmt.scale, u.view(scale.shape))
        return Blocks(codes, scale, None if tensor is None else tensor.decode)

    def in_code_units(self, x: Tensor, *, dim: int = -1) -> Tensor:
        """x (not empty) in units of its scales: what is clamped and rounded to codes; fp32."""
        x32 = to_blocks(x.detach().float(), self.tile, self.fmt.block_size, dim)
        _, inverse, _ = self._scales(x32, block_dims(self.tile, x.dim(), dim))
        return from_blocks(x32 * inverse, x.shape, self.tile, dim)

    def _scales(
        self, x: Tensor, dims: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, TensorScale | None]:
        """(block scales, what elements are multiplied by, tensor scale) of x cut into blocks."""
        assert self.scale_rounding is not None
        amax = x.abs().amax(dims, keepdim=True)
        tensor = None
        if self.two_level:
            tensor = tensor_scale(amax.amax(), self.fmt, largest_scale(self.fmt, self.scale_rule))
        if self.scale_rule is ScaleRule.FOUR_OVER_SIX:
            scale, inverse = four_over_six(x, amax, dims, self.fmt, self.scale_rounding, tensor)
        elif self.scale_rule is ScaleRule.EDEN:
            scale, inverse = clipping_scale(amax, self.fmt, self.scale_rounding, tensor)
        else:
            scale, inverse = block_scale(amax, self.fmt, self.scale_rounding, tensor)
        return scale, inverse, tensor

    @property
    def needs_noise(self) -> bool:
        """Whether the result depends on a noise key."""
        return self.rounding is Rounding.STOCHASTIC or self.scale_rule is ScaleRule.EDEN

    def deterministic(self) -> Quantizer:
        """The same without noise: elements rounded to nearest.

        MS-EDEN, which is noise by nature, gives way to Four Over Six: what Quartet II has beside
        it for the forward pass.
        """
        eden = self.scale_rule is ScaleRule.EDEN
        rule = ScaleRule.FOUR_OVER_SIX if eden else self.scale_rule
        return replace(self, rounding=Rounding.NEAREST, scale_rule=rule)

    def saturated(self, x: Tensor, *, dim: int = -1) -> Tensor:
        """Share of elements beyond the largest value that their block can hold; 0-dim.

        Zero with scales rounded up, to the last bit of fp32; 3.4 % of normally distributed
        values with scales rounded to nearest.
        """
        if x.numel() == 0:
            return x.new_zeros((), dtype=torch.float32)
        x32 = to_blocks(x.detach().float(), self.tile, self.fmt.block_size, dim)
        scale, _, tensor = self._scales(x32, block_dims(self.tile, x.dim(), dim))
        largest = scale * self.fmt.element.max
        if tensor is not None:
            largest = largest * tensor.decode
        tolerance = 1 + 4 * torch.finfo(torch.float32).eps
        return (x32.abs() > largest * tolerance).sum() / x.numel()


_ENUMS: dict[str, type[enum.Enum]] = {
    "rounding": Rounding,
    "scale_rounding": ScaleRounding,
    "tile": Tile,
    "scale_rule": ScaleRule,
}


def _choice(kind: type[enum.Enum], name: str, value: object) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{name}={value!r} is unknown; choose one of {choices}") from None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, quantizer: Quantizer, dim: int, key: noise.Key | None) -> Tensor:
        return quantizer(x, dim=dim, key=key, dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None, None


def fake_quantize(
    x: Tensor,
    fmt: BlockFormat | str = NVFP4,
    *,
    dim: int = -1,
    rounding: str = "nearest",
    scale_rounding: str | None = None,
    two_level: bool | None = None,
    tile: str = "row",
    scale_rule: str = "absmax",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Quantizes to `fmt` and back: the values that a tensor stored in that format would have.

    Arithmetic is fp32 whatever the input. The gradient is straight-through (the identity).

    Args:
        x: any shape, any float dtype; zero-padded to whole blocks along `dim`, padding dropped.
        fmt: a block format or its name: "nvfp4", "mxfp4", "mxfp6-e2m3", "mxfp6-e3m2",
            "mxfp8-e4m3", "mxfp8-e5m2", "fp8-e4m3", "fp8-e5m2", "int4", "nvint4".
        dim: the dimension along which row blocks run.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased).
        scale_rounding: E4M3 scales: "nearest" (TransformerEngine, the default) or "up"
            (arXiv 2509.00404: never clips). E8M0 scales: "floor" (OCP MX, the default) or "up".
        two_level: one fp32 scale per tensor above E4M3 block scales; by default if the format has
            one. Without it, block scales of values below about 1e-2 underflow E4M3 and the tensor
            is lost.
        tile: "row" (1 x block size; the whole row for "fp8-*"), "square" (block size x block size
            over the last two dimensions) or "tensor" (one scale; for fp32 scales).
        scale_rule: "absmax", "four-over-six" (arXiv 2512.02010; NVFP4 only) or "eden" (arXiv
            2601.22813; NVFP4 only): unbiased for a tensor in a random basis, with noise in the
            scales alone.
        generator: source of the stochastic noise; None draws from torch's default generator.

    Returns:
        Tensor of the shape and dtype of `x`. NaN or inf in `x` shows up as NaN.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: an unknown choice, or choices that do not go together.
        IndexError: `dim` is not a dimension of `x`.
    """
    quantizer = Quantizer(
        fmt,  # type: ignore[arg-type]
        rounding,  # type: ignore[arg-type]
        scale_rounding,  # type: ignore[arg-type]
        two_level,
        tile,  # type: ignore[arg-type]
        scale_rule,  # type: ignore[arg-type]
    )
    key = check_input(x, quantizer, dim, generator)
    return _StraightThrough.apply(x, quantizer, dim, key)


def check_input(
    x: Tensor, quantizer: Quantizer, dim: int, generator: torch.Generator | None
) -> noise.Key | None:
    """Refuses what cannot be quantized; returns the noise key if the quantizer takes one."""
    if not x.is_floating_point():
        raise TypeError(f"quantization needs a floating-point tensor, got {x.dtype}")
    ndim = max(x.dim(), 1)
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim={dim} of a tensor of shape {tuple(x.shape)}; give one of its dims")
    if not quantizer.needs_noise:
        return None
    return noise.key_from_generator(generator, x.device)
