"""Fake quantization of whole tensors, computed by the selected kernels.

The results equal `definition` bit for bit.
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
    """A quantizer: its options, and the calls that quantize a tensor.

    Layers call it at each use, so it does not check its arguments: the caller must ensure that `x`
    is floating point, `dim` is one of its dimensions and `amax` is one number. `fake_quantize`
    checks them.

    Args:
        fmt: the block format, or its name.
        rounding: rounding of elements.
        scale_rounding: rounding of block scales; None takes the format's default.
        two_level: whether there is an fp32 scale above the block scales; None takes the format's
            default.
        tile: shape of a block.
        scale_rule: rule for the code to which a block's largest magnitude is scaled.
        outer_scale: whether the tensor or each of its rows has an fp32 scale above the block
            scales. If blocks run along a dimension other than the last, the tensor has one.

    Raises:
        ValueError: an unknown option, or options that exclude each other; the message names valid
            ones.
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
        out: Tensor | None = None,
    ) -> Tensor:
        """Quantize and dequantize `x` in fp32, then round once to `dtype`.

        With `minus` and `plus`, compute plus + Q(x - minus) in the same passes over memory.

        Args:
            x: any shape and float dtype.
            dim: the dimension that row blocks run along; other tiles do not use it.
            key: noise key; required if `needs_noise`.
            dtype: dtype of the result.
            minus: fp32 or fp64, in the shape of `x`; subtracted first.
            plus: the same, added last.
            amax: 0-dim, finite and >= 0, on any device; sets the tensor scale in place of the
                largest magnitude. Blocks that need a scale above the largest one are clipped.
            out: memory in the shape of `x` that the result may take if it is contiguous and of
                its dtype; it may be `minus` or `plus`.
        """
        if x.numel() == 0:
            return x.to(dtype)
        return kernels.fake_quantize(
            x, self, dim=dim, key=key, dtype=dtype, minus=minus, plus=plus, amax=amax, out=out
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
        """Quantize without applying the outer scale: return (code * block scale, global scale).

        The global scale is 0-dim, [.. 1] if each row has one, or None.

        With E8M0 block scales, and with E4M3 block scales on 4-bit elements, code * block scale has
        at most 7 significant bits, so bf16 holds it exactly (except "if4", whose integer blocks
        have a step of 6/7). bf16 could not hold the product with the fp32 tensor scale, so a GEMM
        applies the tensor scales to its output. With fp32 block scales bf16 rounds most values.
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

    Arithmetic is fp32 for every input dtype. The gradient is straight-through (the identity).

    Args:
        x: any shape, any float dtype; zero-padded internally to whole blocks.
        fmt: a block format or its name: "nvfp4", "mxfp4", "mxfp6-e2m3", "mxfp6-e3m2",
            "mxfp8-e4m3", "mxfp8-e5m2", "fp8-e4m3", "fp8-e5m2", "int4", "nvint4", "ufp4",
            "if4", "mixfp4".
        dim: the dimension along which row blocks run.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased).
        scale_rounding: E4M3 scales: "nearest" (TransformerEngine, the default) or "up"
            (arXiv 2509.00404: never clips). E8M0 scales: "floor" (OCP MX, the default), "up" or
            "even" ("floor" of an amax rounded to the precision of a code).
        two_level: whether there is an fp32 scale above E4M3 block scales; None takes the format's
            default. Without it, block scales of values below about 1e-2 underflow E4M3 and the
            values become zero.
        tile: "row" (1 x block size; the whole row for "fp8-*"), "square" (block size x block size
            over the last two dimensions) or "tensor" (one scale; for fp32 scales).
        scale_rule: "absmax"; for NVFP4 only: "four-over-six" (arXiv 2512.02010), "search" (the same
            with six candidate scales) and "eden" (arXiv 2601.22813: unbiased in a random basis;
            only the scales are noisy); for NVFP4, IF4 and MixFP4: "unbiased" (amax is scaled to
            16/17 of the largest code, so that stochastic rounding is unbiased under scales rounded
            to nearest).
        outer_scale: "tensor" (one fp32 scale above the block scales) or "token" (one per row, if
            row blocks run along the last dimension).
        generator: source of the stochastic noise; None draws from torch's default generator.
        amax: 0-dim, finite and >= 0, on any device; sets the tensor scale. None takes the largest
            magnitude of `x`. Blocks that need a scale above the largest one are clipped.

    Returns:
        Tensor of the shape and dtype of `x`. A NaN or inf in `x` gives NaN.

    Raises:
        TypeError: `x` is not a floating-point tensor, `dim` not an integer or `amax` not a tensor.
        ValueError: an unknown option, options that exclude each other, or an invalid `amax`.
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
    """Check the arguments; return the quantizer, and a noise key if it needs one.

    Raises:
        TypeError, ValueError, IndexError: as in `fake_quantize`.
    """
    quantizer = Quantizer(**choices)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"quantization needs a floating-point tensor, got {given}")
    try:
        operator.index(dim)
    except TypeError:
        raise TypeError(f"dim={dim!r} is not an integer; give a dimension of the tensor") from None
    ndim = max(x.dim(), 1)
    if not -ndim <= dim < ndim:
        raise IndexError(
            f"dim={dim} is out of range for a tensor of shape {tuple(x.shape)}; give one of its "
            "dimensions"
        )
    if amax is not None:
        _check_amax(amax, quantizer)
    key = noise.key_from_generator(generator, x.device) if quantizer.needs_noise else None
    return quantizer, key


def _check_amax(amax: Tensor, quantizer: Quantizer) -> None:
    if not isinstance(amax, Tensor):
        raise TypeError(f"amax={amax!r} is not a tensor; pass torch.tensor({amax!r})")
    if amax.dim() or not amax.is_floating_point():
        raise ValueError(
            f"amax must be a 0-dim tensor of a float dtype, but it has shape "
            f"{tuple(amax.shape)} and dtype {amax.dtype}"
        )
    if not quantizer.two_level or quantizer.outer_scale is not OuterScale.TENSOR:
        raise ValueError(
            "amax sets the scale of the whole tensor, but this quantizer "
            f"({quantizer.fmt.name}, two_level={quantizer.two_level}, "
            f'outer_scale="{quantizer.outer_scale.value}") has none; leave amax out'
        )
