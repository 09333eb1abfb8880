"""NVFP4 quantization in few tensor operations that compilers fuse and vectorize.

`fake_quantize` goes there and back; `pack` stops half way, at two codes a byte and block scales,
and `unpack` goes on from there. Each takes what goes around the quantizer of a split along in the
same passes: `minus` is taken off before, `plus` is added after.

The same arithmetic as `metis_hf.numerics.definition`, to the bit; the way there is another one:

- Elements are rounded by adding and subtracting a constant chosen by range, never by way of their
  bits: Inductor's CPU code takes bit casts of vectors through memory.
- What there is once per block (scale, its inverse, hash of its index) is stored before it is used
  (`stored`): else it would be computed again for each element, by scalar code.
- No product is added to anything inexactly, so that contraction into fused multiply-adds, which GPU
  compilers do, changes nothing: clamps, floors and powers of two stand in between.

Tensors come in one of two forms, with every 16 a constant and everything else free to change:
row blocks [b 16], and [g 16 c 16] for blocks along the second to last dimension (column blocks) and
for square ones. The two elements of a byte of codes lie whole vectors apart, so that no vector is
taken to pieces: the halves of [p 2 16] where blocks are rows, of [g 2 8 c 16] where not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.formats import FLT_MAX
from metis_hf.numerics.kernels.block_scales import (
    BLOCK,
    MAX_CODE,
    block_scales,
    by_range,
    corrected,
    nearest,
    stored,
)
from metis_hf.numerics.scaling import ScaleRule


class Specialization(NamedTuple):
    """The choices that a compiled kernel is specialized for."""

    task: str  # "quantize": `fake_quantize`; "pack"; "unpack"
    dims: tuple[int, ...]  # inside a block, of the tensor's form
    two_level: bool
    scale_up: bool = False
    stochastic: bool = False
    scaled: bool = True  # whether the tensor scale is multiplied in
    dtype: torch.dtype = torch.float32  # of the result
    minus: bool = False
    plus: bool = False
    same: bool = False  # minus is plus
    rule: ScaleRule = ScaleRule.ABSMAX
    given: bool = False  # the tensor's largest magnitude is an argument
    rows: bool = False  # that, or what is unpacked, has an outer scale for each row block

    @property
    def needs_noise(self) -> bool:
        """Return whether a noise key goes with it: for elements, or scales rounded at random."""
        return self.stochastic or self.rule is ScaleRule.EDEN


class Noise(NamedTuple):
    """A noise key. Its words are numbers: tensors made of them would be copies from the CPU, and
    keep a graph from being recorded."""

    words: tuple[int, int]  # `noise.static_words`
    data: Tensor  # int32, 0-dim
    lanes: Tensor  # `noise.lane_hashes`, int32 [16]


def run(
    variant: Specialization, key: noise.Key | None, x: Tensor, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """Return `fake_quantize`, `pack` or `unpack`.

    Args:
        variant: which, and what it does.
        key: noise key, where the variant needs one.
        x: the first argument of the function.
        others: tensors after it and the noise, in their order, or None.
    """
    if variant.task == "unpack":
        return unpack(x, variant, *others)  # type: ignore[arg-type]
    source = None
    if key is not None:
        data = key.data
        if data is None:
            data = torch.zeros((), dtype=torch.int32, device=x.device)
        source = Noise(noise.static_words(key), data, noise.lane_hashes(x.device))
    if variant.task == "pack":
        return pack(x, variant, source, *others)
    if variant.same:
        others = (*others, others[-1])
    return fake_quantize(x, variant, source, *others)


def _stochastic(magnitude: Tensor, uniform: Tensor) -> Tensor:
    """Round values in [0, 6] to a neighbouring E2M1 value, as `rounding.round_stochastic`."""
    steps = magnitude * by_range(magnitude, 2.0, 1.0, 0.5)
    lower = steps.floor()
    up = ((steps - lower) - uniform).ceil()
    return (lower + up) * by_range(magnitude, 0.5, 1.0, 2.0)


def _with_sign(magnitude: Tensor, like: Tensor) -> Tensor:
    """Return `magnitude` with the sign of `like`; it is 0 where `like` is, and takes its zero.

    It does what `copysign` does, for which generated C++ calls a function for each vector.
    """
    return torch.where(like == 0, like, torch.where(like < 0, _negative(magnitude), magnitude))


def _negative(x: Tensor) -> Tensor:
    """Negate; 0 becomes -0. Where Inductor writes Triton, `-x` is 0 - x up to Triton 3.6."""
    return x * -1.0


def _uniform(shape: torch.Size, source: Noise) -> Tensor:
    lead = shape[:-1]
    blocks = stored(noise.block_hashes(math.prod(lead), source.words, source.data)).view(*lead, 1)
    return noise.to_uniform(noise.element_bits(blocks, source.lanes))


class _Scaled(NamedTuple):
    """The tensors that rounding starts from."""

    x: Tensor  # fp32
    scale: Tensor  # of blocks
    inverse: Tensor  # what elements are multiplied by
    decode: Tensor | None  # tensor scale
    uniform: Tensor | None  # of stochastic rounding


def _scaled(
    x: Tensor,
    variant: Specialization,
    source: Noise | None,
    amax: Tensor | None,
    minus: Tensor | None,
) -> _Scaled:
    x = x.float()
    if minus is not None:
        x = x - minus
    scale, inverse, decode = block_scales(
        x,
        variant.dims,
        rule=variant.rule,
        up=variant.scale_up,
        two_level=variant.two_level,
        largest=amax,
    )
    uniform = None
    if variant.rule is ScaleRule.EDEN:
        assert source is not None
        bits = noise.element_bits(*noise.hashes_of_each(scale.numel(), source.words, source.data))
        scale = corrected(x * inverse, scale, variant.dims, noise.to_uniform(bits))
    elif source is not None:
        uniform = _uniform(x.shape, source)
    return _Scaled(x, scale, inverse, decode, uniform)


def _rounded(magnitude: Tensor, uniform: Tensor | None) -> Tensor:
    return nearest(magnitude) if uniform is None else _stochastic(magnitude, uniform)


def _finished(values: Tensor, plus: Tensor | None, dtype: torch.dtype) -> Tensor:
    if plus is not None:
        # The clamp keeps the product before it and the sum apart; see `reference.add_back`.
        values = values.clamp(max=FLT_MAX) + plus
    return values.to(dtype)


def fake_quantize(
    x: Tensor,
    variant: Specialization,
    source: Noise | None = None,
    amax: Tensor | None = None,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Quantize to NVFP4 and back: plus + Q(x - minus).

    Args:
        x: fp32, bf16 or fp16, contiguous, in one of the forms above.
        variant: what to do.
        source: of noise, where the variant needs it.
        amax: fp32, what the outer scale is made of: 0-dim, or for each row block [b 1]; None: the
            largest magnitude.
        minus: fp32, of the shape of `x`.
        plus: fp32, of the shape of `x`.

    Returns:
        (values,) of the shape of `x`; where the outer scale is not multiplied in, also that scale,
        fp32, of the shape of `amax`.
    """
    x, scale, inverse, decode, uniform = _scaled(x, variant, source, amax, minus)
    scaled = x * inverse
    codes = _rounded(scaled.abs().clamp(max=MAX_CODE), uniform)
    values = _with_sign(codes, scaled) * scale
    if decode is None:
        return (_finished(values, plus, variant.dtype),)
    if not variant.scaled:
        return values.to(variant.dtype), decode
    return (_finished(values * decode, plus, variant.dtype),)


def _code(scaled: Tensor, uniform: Tensor | None) -> Tensor:
    """Round to E2M1 codes 0 to 15, as fp32 numbers; NaN gives 0 or 8."""
    magnitude = scaled.abs().clamp(max=MAX_CODE)
    rounded = _rounded(magnitude, uniform)
    # 0 .5 1 1.5, 2 3, 4 6 are the codes 0 to 7. Comparisons leave NaN to the last choice: it must
    # not spoil the other code of the byte.
    last = torch.where(rounded <= MAX_CODE, rounded * 0.5 + 4, 0.0)
    code = torch.where(rounded < 2, rounded * 2, torch.where(rounded < 4, rounded + 2, last))
    negative = torch.where(scaled == 0, 1 / scaled, scaled) < 0  # of -0 too
    return torch.where(negative, code + 8, code)


def _decoded(code: Tensor) -> Tensor:
    """Return the values, fp32, of E2M1 codes 0 to 15, fp32 numbers."""
    negative = code >= 8
    code = torch.where(negative, code - 8, code)
    value = torch.where(code < 4, code * 0.5, torch.where(code < 6, code - 2, code * 2 - 8))
    return torch.where(negative, _negative(value), value)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Part the two elements of bytes: [p 2 16] -> [p 16] each, [g 16 c 16] -> [g 8 c 16] each."""
    return (x[:, 0], x[:, 1]) if x.dim() == 3 else (x[:, : BLOCK // 2], x[:, BLOCK // 2 :])


def _half_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Block scales of the halves: [p 2 1] -> [p 1] each; a column's or a square's go to both."""
    return (scale[:, 0], scale[:, 1]) if scale.dim() == 3 else (scale, scale)


def pack(
    x: Tensor,
    variant: Specialization,
    source: Noise | None = None,
    amax: Tensor | None = None,
    minus: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Quantize x - minus to codes and scales.

    Args:
        x: as in `fake_quantize`, row blocks as [p 2 16].
        variant: what to do.
        source: of noise, where the variant needs it.
        amax: fp32, what the outer scale is made of: 0-dim, or for each row block [p 2 1]; None: the
            largest magnitude.
        minus: fp32, of the shape of `x`.

    Returns:
        (codes uint8 [p 16] or [g 8 c 16], block scales E4M3, tensor scale if there is one).
    """
    x, scale, inverse, decode, uniform = _scaled(x, variant, source, amax, minus)
    uniforms = (None, None) if uniform is None else halves(uniform)
    low, high = (
        _code(half * half_inverse, half_uniform)
        for half, half_inverse, half_uniform in zip(halves(x), _half_scales(inverse), uniforms)
    )
    codes = (low + high * 16).to(torch.uint8)
    stored = scale.to(torch.float8_e4m3fn)
    return (codes, stored) if decode is None else (codes, stored, decode)


def unpack(
    codes: Tensor,
    variant: Specialization,
    scale: Tensor,
    decode: Tensor | None = None,
    plus: Tensor | None = None,
) -> tuple[Tensor]:
    """Return plus + the values that `pack` stored.

    Args:
        codes: uint8 [p 16] or [g 8 c 16].
        variant: its `dtype`, `scaled` and `dims`.
        scale: E4M3, [p 2 1], [g 1 c 16] or [g 1 c 1].
        decode: outer scale, fp32, 0-dim or [p 2 1].
        plus: fp32 [p 2 16] or [g 16 c 16].

    Returns:
        values [p 2 16] or [g 16 c 16].
    """
    byte = codes.float()
    high = (byte * (1 / 16)).floor()
    pairs = (byte - high * 16, high)
    scales = _half_scales(stored(scale.float()))
    decodes = (decode, decode) if decode is None or not variant.rows else _half_scales(decode)
    added = (None, None) if plus is None else halves(plus)
    out = []
    for code, half_scale, half_decode, half_plus in zip(pairs, scales, decodes, added):
        values = _decoded(code) * half_scale
        if half_decode is not None and variant.scaled:
            values = values * half_decode
        out.append(_finished(values, half_plus, variant.dtype))
    if codes.dim() == 2:
        return (torch.stack(out, 1),)
    return (torch.cat(out, 1),)
