"""NVFP4 fake quantization in few tensor operations that compilers fuse and vectorize.

The arithmetic is that of `metis_hf.numerics.quantize`, to the bit; the way there is another one:

- Elements are rounded by adding and subtracting a constant chosen by range, never by way of their
  bits: Inductor's CPU code takes bit casts of vectors through memory.
- What there is once per block (scale, its inverse, hash of its index) is stored before it is used
  (`_stored`): else it would be computed again for each element, by scalar code.
- No product is added to anything inexactly, so that contraction into fused multiply-adds, which GPU
  compilers do, changes nothing: clamps, floors and powers of two stand in between.

Tensors come in one of two forms, with every 16 a constant and everything else free to change:
row blocks [b 16], and [g 16 c 16] for blocks along the second to last dimension (column blocks) and
for square ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.formats import E4M3, FLT_MAX

BLOCK = 16
_INVERSE_MAX_CODE = 1 / 6
_MAX_CODE = 6.0
_MAGIC = 1.5 * 2.0**23  # times a power of two: fp32 numbers around it are that power apart
_SCALE_SPACING = 2.0**-9  # of E4M3 values below its smallest normal number
_SCALE_NORMAL = 2.0**-6
_DROPPED = 20  # mantissa bits of fp32 that E4M3 lacks


class Variant(NamedTuple):
    """What a compiled kernel is specialized for."""

    dims: tuple[int, ...]  # inside a block, of the tensor's form
    two_level: bool
    scale_up: bool
    stochastic: bool
    scaled: bool  # whether the tensor scale is multiplied in
    dtype: torch.dtype  # of the result


class Noise(NamedTuple):
    """A noise key in tensors: nothing in a compiled kernel depends on its values."""

    words: Tensor  # int32 [2], `noise.static_words`
    data: Tensor  # int32, 0-dim
    lanes: Tensor  # int32 [16], `noise.lane_hashes`


def _stored(x: Tensor) -> Tensor:
    """The same tensor, which Inductor then keeps in memory instead of computing it where used."""
    return x.as_strided(x.shape, x.stride())


def _round_e4m3(value: Tensor, up: bool) -> Tensor:
    """fp32 in [0, 448] or NaN to an E4M3 value, still fp32: nearest with ties to even, or up."""
    bits = value.view(torch.int32)
    if up:
        normal = bits + ((1 << _DROPPED) - 1)
        small = torch.ceil(value * (1 / _SCALE_SPACING)) * _SCALE_SPACING
    else:
        normal = bits + ((bits >> _DROPPED) & 1) + ((1 << _DROPPED - 1) - 1)
        small = (value + _MAGIC * _SCALE_SPACING) - _MAGIC * _SCALE_SPACING
    normal = (normal & -(1 << _DROPPED)).view(torch.float32)
    # In this order: the bits of a NaN may have overflowed, arithmetic has kept it.
    return torch.where(value >= _SCALE_NORMAL, normal, small)


def _scales(amax: Tensor, variant: Variant) -> tuple[Tensor, Tensor, Tensor | None]:
    """(block scales, what elements are multiplied by, tensor scale) from the blocks' amax."""
    decode = None
    to_scale: Tensor | float = _INVERSE_MAX_CODE
    if variant.two_level:
        largest = _stored(amax.amax())
        encode = torch.full_like(largest, E4M3.max * _MAX_CODE) / largest
        encode = _stored(torch.where(largest == 0, 1.0, encode.clamp(max=FLT_MAX)))
        decode = _stored(encode.reciprocal())
        to_scale = encode * _INVERSE_MAX_CODE
    wanted = amax * to_scale
    # Infinity becomes NaN rather than the largest scale.
    wanted = torch.where(wanted > FLT_MAX, torch.nan, wanted.clamp(max=E4M3.max))
    scale = _stored(_round_e4m3(wanted, variant.scale_up))
    decoded = scale if decode is None else scale * decode
    return scale, _stored(decoded.reciprocal().clamp(max=FLT_MAX)), decode


def _by_range(magnitude: Tensor, low: float, middle: float, high: float) -> Tensor:
    """A constant for each binade of E2M1: below 2, below 4, above."""
    return torch.where(magnitude < 2, low, torch.where(magnitude < 4, middle, high))


def _nearest(magnitude: Tensor) -> Tensor:
    """Values in [0, 6] to the nearest E2M1 value, ties to even."""
    magic = _by_range(magnitude, 0.5 * _MAGIC, _MAGIC, 2 * _MAGIC)
    return (magnitude + magic) - magic


def _stochastic(magnitude: Tensor, uniform: Tensor) -> Tensor:
    """Values in [0, 6] to one of the neighbouring E2M1 values; see `rounding.round_stochastic`."""
    steps = magnitude * _by_range(magnitude, 2.0, 1.0, 0.5)
    lower = steps.floor()
    up = ((steps - lower) - uniform).ceil()
    return (lower + up) * _by_range(magnitude, 0.5, 1.0, 2.0)


def _uniform(shape: torch.Size, source: Noise) -> Tensor:
    words = (source.words[0], source.words[1])
    lead = shape[:-1]
    blocks = _stored(noise.block_hashes(math.prod(lead), words, source.data)).view(*lead, 1)
    return noise.to_uniform(noise.element_bits(blocks, source.lanes))


def fake_quantize(x: Tensor, variant: Variant, source: Noise | None) -> tuple[Tensor, ...]:
    """Quantizes to NVFP4 and back.

    Args:
        x: fp32, bf16 or fp16, contiguous, in one of the forms above.
        variant: what to do.
        source: of stochastic rounding.

    Returns:
        (values,) of the shape of `x`; where the tensor scale is not multiplied in, also that scale,
        0-dim fp32.
    """
    x = x.float()
    amax = x.abs().amax(variant.dims, keepdim=True)
    scale, inverse, decode = _scales(amax, variant)
    scaled = x * inverse
    magnitude = scaled.abs().clamp(max=_MAX_CODE)
    if variant.stochastic:
        assert source is not None
        codes = _stochastic(magnitude, _uniform(x.shape, source))
    else:
        codes = _nearest(magnitude)
    values = codes.copysign(scaled) * scale
    if decode is None:
        return (values.to(variant.dtype),)
    if not variant.scaled:
        return values.to(variant.dtype), decode
    return ((values * decode).to(variant.dtype),)
