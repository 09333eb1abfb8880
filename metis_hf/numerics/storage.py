"""Quantized storage: packed codes, block scales in their stored dtype, and the tensor scale.

`quantize` followed by `dequantize` gives exactly the values of `fake_quantize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.numerics.definition import Blocks
from metis_hf.numerics.formats import NVFP4, BlockFormat
from metis_hf.numerics.layout import Tile
from metis_hf.numerics.mixed import decoded, encoded
from metis_hf.numerics.quantize import prepare


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor stored in a block format, with row blocks along the last dimension of its fields.

    Attributes:
        codes: uint8 [.., bytes]: the codes of a row of blocks, packed from the low bits up: two
            4-bit codes per byte (low nibble = even element), four 6-bit codes per three bytes.
        scale: block scales in their stored dtype, [.., blocks] for rows, [.., row tiles, column
            tiles] for square tiles, 0-dim for one block.
        global_scale: fp32, 0-dim or one for each row [.. 1], or None; value = code * scale *
            global_scale.
        fmt, tile: the format and the shape of its blocks.
        shape, dtype, dim: of the original tensor; its row blocks ran along `dim`.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    fmt: BlockFormat
    tile: Tile
    shape: torch.Size
    dtype: torch.dtype
    dim: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        tensors = (self.codes, self.scale, self.global_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self) -> Tensor:
        """Return the represented tensor, in the original's shape and dtype."""
        return dequantize(self)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """Return the same tensor on another device."""
        fields = dict(self.__dict__)
        for name in ("codes", "scale", "global_scale"):
            fields[name] = None if fields[name] is None else fields[name].to(device)
        return QuantizedTensor(**fields)


def quantize(
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
) -> QuantizedTensor:
    """Quantize to packed codes and scales; arguments and errors as in `fake_quantize`.

    >>> from metis_hf.numerics import fake_quantize
    >>> x = torch.linspace(-1, 1, 32)
    >>> q = quantize(x)
    >>> q.codes.shape, q.scale.dtype, q.nbytes  # 32 codes in 16 bytes, 2 scales, 1 tensor scale
    (torch.Size([16]), torch.float8_e4m3fn, 22)
    >>> torch.equal(q.dequantize(), fake_quantize(x))
    True
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
    fmt, element = quantizer.fmt, quantizer.fmt.element
    rows = x.detach()
    rows = rows.reshape(1) if rows.dim() == 0 else rows
    if quantizer.tile is Tile.ROW:
        rows = rows.movedim(dim, -1)
    if x.numel() == 0:
        codes, scale, global_scale = rows.to(torch.uint8), rows.to(fmt.scale.dtype), None
    else:
        # `x`, not `rows`: noise is drawn in the elements' original order, as in `fake_quantize`.
        blocks = quantizer.blocks(x, dim=dim, key=key, amax=amax)
        bits = encoded(element, blocks.scale, blocks.codes)
        codes = pack(_matrix(bits, quantizer.tile, dim), element.bits)
        scale = _scale_matrix(blocks.scale, quantizer.tile, dim).to(fmt.scale.dtype)
        global_scale = blocks.global_scale
        if quantizer.tile is Tile.SQUARE:
            codes = codes[..., : x.shape[-2], :]
    codes, scale = codes.contiguous(), scale.contiguous()
    return QuantizedTensor(codes, scale, global_scale, fmt, quantizer.tile, x.shape, x.dtype, dim)


def dequantize(q: QuantizedTensor) -> Tensor:
    """Compute the tensor that codes and scales represent, in the original's shape and dtype."""
    if math.prod(q.shape) == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.codes.device)
    element, size = q.fmt.element, q.fmt.block_size
    bits = unpack(q.codes, element.bits)  # [.. n]
    scale = q.scale.float()
    shape = q.shape or torch.Size([1])
    if q.tile is Tile.ROW:
        length = shape[q.dim]
        size = size or length
        bits = bits[..., : scale.shape[-1] * size].unflatten(-1, (-1, size))
        scale = scale[..., None]
        values = Blocks(decoded(element, scale, bits), scale, q.global_scale, element).values()
        values = values.flatten(-2)[..., :length].movedim(-1, q.dim)
    else:
        if q.tile is Tile.SQUARE:
            assert size is not None
            scale = scale.repeat_interleave(size, -2)[..., : shape[-2], :]
            scale = scale.repeat_interleave(size, -1)[..., : shape[-1]]
        codes = decoded(element, scale, bits[..., : shape[-1]])
        values = Blocks(codes, scale, q.global_scale, element).values()
    return values.reshape(q.shape).to(q.dtype)


def _codes_per_group(bits: int) -> int:
    """Return the smallest number of codes that fills whole bytes; they have at most 56 bits."""
    return 8 // math.gcd(8, bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack [.. n] codes of `bits` bits (uint8) into [.. n * bits / 8] bytes, low bits first.

    The last dimension is zero-padded to a multiple of `_codes_per_group(bits)`.
    """
    group = _codes_per_group(bits)
    if group == 1:
        return codes
    codes = F.pad(codes, (0, -codes.shape[-1] % group)).unflatten(-1, (-1, group)).long()
    word = codes[..., 0]
    for place in range(1, group):
        word = word | codes[..., place] << (bits * place)
    count = group * bits // 8
    return torch.stack([(word >> (8 * i)) & 0xFF for i in range(count)], -1).flatten(-2).byte()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack`: [.. n * bits / 8] bytes -> [.. n] codes (uint8)."""
    group = _codes_per_group(bits)
    if group == 1:
        return packed
    count = group * bits // 8
    parts = packed.unflatten(-1, (-1, count)).long()
    word = parts[..., 0]
    for place in range(1, count):
        word = word | parts[..., place] << (8 * place)
    mask = 2**bits - 1
    return torch.stack([(word >> (bits * i)) & mask for i in range(group)], -1).flatten(-2).byte()


def _matrix(blocks: Tensor, tile: Tile, dim: int) -> Tensor:
    """Reshape codes in blocks to [.. n], with the blocked dimension last; keeps the padding."""
    if tile is Tile.TENSOR:
        return blocks
    if tile is Tile.SQUARE:
        return blocks.flatten(-4, -3).flatten(-2, -1)
    ndim = blocks.dim() - 1
    return blocks.flatten(dim % ndim, dim % ndim + 1).movedim(dim % ndim, -1)


def _scale_matrix(scale: Tensor, tile: Tile, dim: int) -> Tensor:
    """Drop the dimensions inside a block from block scales; move the blocked dimension last."""
    if tile is Tile.TENSOR:
        return scale.reshape(())
    if tile is Tile.SQUARE:
        return scale.squeeze(-1).squeeze(-2)
    ndim = scale.dim() - 1
    return scale.squeeze(dim % ndim + 1).movedim(dim % ndim, -1)
