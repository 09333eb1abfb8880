"""Quantizers of whole tensors, computed by the kernels in force: there and back.

Their arithmetic equals `definition`, to the bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics import kernels
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import NVFP4, BlockFormat
from metis_hf.numerics.scaling import OuterScale


@dataclass(frozen=True)
class Quantizer(QuantizerDefinition):
    """The choices of a quantizer, and the call that quantizes a tensor.

    Layers call it at each use, so it checks no tensors: that `x` is floating point, `dim` one of
    its dimensions and `amax` one number is the caller's to see to. `fake_quantize` does.

    Args:
        fmt: the block format, or its name.
        rounding: of elements.
        scale_rounding: of block scales; None takes the format's default.
        two_level: one fp32 scale per tensor above the block scales; None: if the format has one.
        tile: shape of a block.
        scale_rule: which code the largest magnitude of a block is scaled to.
        outer_scale: what has one fp32 scale of the second level: the tensor, or each of its rows.
            Blocks along another dimension than the last cross the rows: then the tensor has one.

    Raises:
        ValueError: choices that do not exist, or not together; the message says which do.
    """

    def __call__(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        key: noise.Key | int | None = None,
        dtype: torch.dtype = torch.float32,
        minus: Tensor | None = None,
        plus: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> Tensor:
        """Fake-quantize: the shape of `x`, rounded from fp32 to `dtype` at the end.

        With `minus` and `plus` it is plus + Q(x - minus), in the same passes over memory.

        Args:
            x: any shape and float dtype.
            dim: the dimension that row blocks run along; other tiles do not use it.
            key: noise key, where `needs_noise`.
            dtype: of the result.
            minus: of the shape of `x`, fp32 (fp64): taken off before.
            plus: the same, added after.
            amax: 0-dim, finite and >= 0, on any device: the tensor scale is made of it instead of
                the largest magnitude of `x`. Blocks that need a larger scale than the largest are
                clipped.
        """
        if x.numel() == 0:
            return x.to(dtype)
        return kernels.fake_quantize(
            x, self, dim=dim, key=key, dtype=dtype, minus=minus, plus=plus, amax=amax
        )[0]

    def unscaled(
        self,
        x: Tensor,
        *,
        dim: int = -1,
        key: noise.Key | int | None = None,
        dtype: torch.dtype = torch.float32,
        amax: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Quantize with the outer scale apart: (code * block scale, global scale).

        The global scale is 0-dim, or [.. 1] where each row has one.

        Under E8M0 block scales, and for 4-bit elements under E4M3 ones, code * block scale has 7
        significant bits at most, so bf16 holds it exactly (not for "if4", whose integer blocks have
        a step of 6/7); the product with the fp32 tensor scale it could not. A GEMM applies the
        tensor scales to its output. Under fp32 block scales bf16 rounds most values.
        """
        if x.numel() == 0:
            return x.to(dtype), None
        return kernels.fake_quantize(
            x, self, dim=dim, key=key, dtype=dtype, scaled=False, amax=amax
        )


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        quantizer: Quantizer,
        dim: int,
        key: noise.Key | None,
        amax: Tensor | None,
    ) -> Tensor:
        return quantizer(x, dim=dim, key=key, dtype=x.dtype, amax=amax)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


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
    outer_scale: str = "tensor",
    generator: torch.Generator | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """Quantize to `fmt` and back: the values that a tensor stored in that format would have.

    Arithmetic is fp32 whatever the input. The gradient is straight-through (the identity).

    Args:
        x: any shape, any float dtype; zero-padded to whole blocks along `dim`, padding dropped.
        fmt: a block format or its name: "nvfp4", "mxfp4", "mxfp6-e2m3", "mxfp6-e3m2",
            "mxfp8-e4m3", "mxfp8-e5m2", "fp8-e4m3", "fp8-e5m2", "int4", "nvint4", "ufp4",
            "if4", "mixfp4".
        dim: the dimension along which row blocks run.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased).
        scale_rounding: E4M3 scales: "nearest" (TransformerEngine, the default) or "up"
            (arXiv 2509.00404: never clips). E8M0 scales: "floor" (OCP MX, the default), "up" or
            "even" (of an amax rounded to as many bits as a code has).
        two_level: one fp32 scale per tensor above E4M3 block scales; by default if the format has
            one. Without it, block scales of values below about 1e-2 underflow E4M3 and the tensor
            is lost.
        tile: "row" (1 x block size; the whole row for "fp8-*"), "square" (block size x block size
            over the last two dimensions) or "tensor" (one scale; for fp32 scales).
        scale_rule: "absmax"; for NVFP4 only: "four-over-six" (arXiv 2512.02010), "search" (six
            scales in the same way) and "eden" (arXiv 2601.22813: unbiased in a random basis,
            with noise in the scales alone); for NVFP4, IF4 and MixFP4: "unbiased" (amax on 16/17 of
            6: stochastic rounding is then unbiased with scales to nearest).
        outer_scale: what has one fp32 scale of the two-level kind: "tensor", or "token": each row,
            where row blocks run along the last dimension.
        generator: source of the stochastic noise; None draws from torch's default generator.
        amax: 0-dim, finite and >= 0, on any device: the tensor scale is made of it; None takes the
            largest magnitude of `x`. Blocks that need a larger scale than the largest are clipped.

    Returns:
        Tensor of the shape and dtype of `x`. NaN or inf in `x` shows up as NaN.

    Raises:
        TypeError: `x` is no floating-point tensor, `dim` no integer, or `amax` no tensor.
        ValueError: an unknown choice, or choices that do not go together.
        IndexError: `dim` is not a dimension of `x`.
    """
    quantizer, key = prepare(
        x,
        dim,
        generator,
        amax,
        fmt=fmt,
        rounding=rounding,
        scale_rounding=scale_rounding,
        two_level=two_level,
        tile=tile,
        scale_rule=scale_rule,
        outer_scale=outer_scale,
    )
    return _StraightThrough.apply(x, quantizer, dim, key, amax)


def prepare(
    x: Tensor,
    dim: int,
    generator: torch.Generator | None,
    amax: Tensor | None,
    **choices: Any,
) -> tuple[Quantizer, noise.Key | None]:
    """Return the quantizer of these choices, and the noise key if it takes one.

    Raises:
        TypeError, ValueError, IndexError: as `fake_quantize`.
    """
    quantizer = Quantizer(**choices)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"quantization needs a floating-point tensor, got {given}")
    try:
        operator.index(dim)
    except TypeError:
        raise TypeError(f"dim={dim!r} is no integer; give one of the dims of the tensor") from None
    ndim = max(x.dim(), 1)
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim={dim} of a tensor of shape {tuple(x.shape)}; give one of its dims")
    if amax is not None:
        _check_amax(amax, quantizer)
    key = noise.key_from_generator(generator, x.device) if quantizer.needs_noise else None
    return quantizer, key


def _check_amax(amax: Tensor, quantizer: Quantizer) -> None:
    if not isinstance(amax, Tensor):
        raise TypeError(f"amax={amax!r} is no tensor; give torch.tensor({amax!r})")
    if amax.dim() or not amax.is_floating_point():
        raise ValueError(
            f"amax is one number, 0-dim and of a float dtype, and this has shape "
            f"{tuple(amax.shape)} and {amax.dtype}"
        )
    if not quantizer.two_level or quantizer.outer_scale is not OuterScale.TENSOR:
        raise ValueError(
            "amax sets the scale of the whole tensor, and this quantizer "
            f"({quantizer.fmt.name}, two_level={quantizer.two_level}, "
            f'outer_scale="{quantizer.outer_scale.value}") has none; leave amax out'
        )
