"""The reference quantizers, in torch operations: every format and tile, on every device.

These results, from `definition.QuantizerDefinition.blocks`, are the ones that the other
implementations must match bit for bit.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition, in_blocks
from metis_hf.numerics.formats import E2M1, FLT_MAX
from metis_hf.numerics.kernels.layout import Packed, blocked_shape, in_row_blocks, run_of
from metis_hf.numerics.layout import block_dims, from_blocks
from metis_hf.numerics.mixed import decoded, encoded, steps_of

_SMALLEST_HALF = 2.0**-14  # smallest normal number of fp16


def fake_quantize(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    dtype: torch.dtype,
    scaled: bool,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    amax: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `kernels.fake_quantize`; `out` is not used."""
    blocks = quantizer.blocks(x if minus is None else x - minus, dim=dim, key=key, amax=amax)
    missing_scale = None
    if not scaled:
        missing_scale = blocks.global_scale
        blocks = blocks._replace(global_scale=None)
    values = from_blocks(blocks.values(), x.shape, quantizer.tile, dim)
    return add_back(values, plus).to(dtype), missing_scale


def add_back(values: Tensor, plus: Tensor | None) -> Tensor:
    """Return values + plus, with values above FLT_MAX clamped to it; overwrites `values`.

    The clamp changes only tensors with entries at the end of the fp32 range. It keeps compilers
    from fusing this sum with the product that gave `values`.
    """
    return values if plus is None else values.clamp_(max=FLT_MAX).to(plus.dtype).add_(plus)


def pack(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    minus: Tensor | None = None,
    amax: Tensor | None = None,
) -> Packed:
    """See `kernels.pack`."""
    fmt = quantizer.fmt
    blocks = quantizer.blocks(x if minus is None else x - minus, dim=dim, key=key, amax=amax)
    fast = fmt.element == E2M1
    codes = _encode_e2m1(blocks.codes) if fast else encoded(fmt.element, blocks.scale, blocks.codes)
    scale = blocks.scale.flatten()
    if fmt.element.bits == 4:
        run = run_of(codes.shape, quantizer.tile, dim)
        flat = F.pad(codes.flatten(), (0, -codes.numel() % (2 * run))).view(-1, 2, run)
        codes = flat[:, 0] | flat[:, 1] << 4
        if in_row_blocks(quantizer.tile, dim):
            scale = F.pad(scale, (0, len(scale) % 2))  # one for each block in `codes`
    return Packed(codes, scale.to(fmt.scale.dtype), blocks.global_scale)


def pack_with_values(
    x: Tensor,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    key: noise.Key | int | None,
    minus: Tensor | None,
    amax: Tensor | None,
    **_: object,
) -> tuple[Packed, None]:
    """See `kernels.pack_with_values`; the reference does not write values."""
    return pack(x, quantizer, dim=dim, key=key, minus=minus, amax=amax), None


def unpack(
    packed: Packed,
    quantizer: QuantizerDefinition,
    *,
    dim: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    scaled: bool,
    plus: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.unpack`; `out` is not used."""
    codes, scale = blocks_of(packed, quantizer, dim=dim, shape=shape)
    element = quantizer.fmt.element
    values = decode_e2m1(codes) if element == E2M1 else decoded(element, scale, codes)
    values = values.mul_(steps_of(element, scale))
    if packed.global_scale is not None and scaled:
        values = values.mul_(in_blocks(packed.global_scale))
    return add_back(from_blocks(values, shape, quantizer.tile, dim), plus).to(dtype)


def blocks_of(
    packed: Packed, quantizer: QuantizerDefinition, *, dim: int, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Unpack the result of `pack` to one byte per code.

    Args:
        packed, quantizer, dim, shape: as in `kernels.unpack`.

    Returns:
        (codes, uint8 in the order of `to_blocks`; block scales in their stored dtype, broadcastable
        against the codes).
    """
    fmt, tile = quantizer.fmt, quantizer.tile
    blocked = blocked_shape(shape, tile, fmt.block_size, dim)
    codes = packed.codes
    if fmt.element.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1)
    codes = codes.flatten()[: math.prod(blocked)].view(blocked)
    inside = {d % len(blocked) for d in block_dims(tile, len(shape), dim)}
    scales = [1 if d in inside else size for d, size in enumerate(blocked)]
    return codes, packed.scale[: math.prod(scales)].view(scales)


def _encode_e2m1(values: Tensor) -> Tensor:
    """Compute `E2M1.encode` several times faster, through fp16.

    Scaled so that 1.0 becomes fp16's smallest normal number, which makes 0.5 subnormal in both
    formats, a value has its E2M1 code in its fp16 bits: the sign, two exponent bits (the other
    exponent bits are zero) and one mantissa bit.
    """
    bits = (values * _SMALLEST_HALF).to(torch.float16).view(torch.int16)
    magnitude = (bits >> 9).bitwise_and_(7)
    return magnitude.bitwise_or_((bits >> 12).bitwise_and_(8)).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Compute `E2M1.decode`, by the inverse of `_encode_e2m1`."""
    codes = codes.to(torch.int16)
    bits = (codes & 7).bitwise_left_shift_(9).bitwise_or_((codes & 8) << 12)
    return bits.view(torch.float16).float().mul_(1 / _SMALLEST_HALF)
