"""Memory layouts of the kernels, on any device: blocks, packed codes, low-rank parts, rotations.

Also the conditions under which the kernels support a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.definition import QuantizerDefinition
from metis_hf.numerics.formats import NVFP4, BlockFormat
from metis_hf.numerics.layout import Tile
from metis_hf.numerics.rounding import Rounding
from metis_hf.numerics.scaling import ScaleRule

BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that kernels read and write
# Kernels use 32-bit indices, up to the end of the last program and of the last, padded blocks.
MAX_ELEMENTS = 2**31 - 2**13


def readable(x: Tensor) -> Tensor:
    """Return the tensor in a dtype that kernels read."""
    return x if x.dtype in DTYPES else x.float()


class Packed(NamedTuple):
    """A quantized matrix in memory: 4.5 bits per element for NVFP4, plus a 32-bit tensor scale.

    The layout is for kernels, not for files: codes are in `to_blocks` order. A byte holds two 4-bit
    codes; the second (in the high nibble) lies `run_of` elements after the first.

    Attributes:
        codes: uint8.
        scale: block scales in their stored dtype [blocks]; padded to an even number for row blocks
            of 4-bit codes.
        global_scale: fp32, 0-dim or one per row [t 1], or None.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None


class Low(NamedTuple):
    """A low-rank matrix (left * lengths) @ right, which kernels subtract or add; see `fused`.

    Attributes:
        left, right: [t k] and [k c], both packed along the same dimension.
        lengths: [k], fp32.
    """

    left: Packed
    lengths: Tensor
    right: Packed


class Groups(NamedTuple):
    """The rotation of a matrix in groups along one of its dimensions; see `fused`.

    Attributes:
        size: entries per group; a power of two from 16 to 128 that divides the length of the
            dimension, rounded up to a multiple of 16.
        signs: noise key of the signs D [size], the same for all groups; None for no signs.
    """

    size: int
    signs: noise.Key | None = None


def in_row_blocks(tile: Tile, dim: int) -> bool:
    """Return whether blocks of a matrix lie along its rows."""
    return tile is Tile.ROW and dim % 2 == 1


def blocked_shape(
    shape: tuple[int, int], tile: Tile, size: int | None, dim: int
) -> tuple[int, ...]:
    """Return the shape that `to_blocks` gives a matrix."""
    rows, columns = shape
    if tile is Tile.TENSOR:
        return shape
    if tile is Tile.SQUARE:
        assert size is not None
        return -(-rows // size), size, -(-columns // size), size
    size = size or shape[dim]
    if dim % 2:
        return rows, -(-columns // size), size
    return -(-rows // size), size, columns


def run_of(blocked: Sequence[int], tile: Tile, dim: int) -> int:
    """Return the distance in elements between the two codes of a byte of a packed matrix.

    The second code is in the next block of the same row, or in the other half of the same column
    block or square. `blocked` is the shape of the matrix cut into blocks.
    """
    if tile is Tile.TENSOR or in_row_blocks(tile, dim):
        return blocked[-1]
    within = math.prod(blocked[1:])
    return within // 2 if blocked[1] % 2 == 0 else within


def packed_shapes(
    shape: tuple[int, int], tile: Tile, fmt: BlockFormat, dim: int
) -> tuple[tuple[int, ...], int]:
    """Return the shape of a packed matrix's codes, and the number of its block scales."""
    blocked = blocked_shape(shape, tile, fmt.block_size, dim)
    elements, in_rows = math.prod(blocked), in_row_blocks(tile, dim)
    size = blocked[-1] if in_rows else blocked[1]
    inside = {Tile.TENSOR: elements, Tile.SQUARE: size * size}.get(tile, size)
    blocks = elements // inside
    if fmt.element.bits != 4:
        return blocked, blocks
    run = run_of(blocked, tile, dim)
    return (-(-elements // (2 * run)), run), blocks + (blocks % 2 if in_rows else 0)


def has_form(x: Tensor, tile: Tile, dim: int) -> bool:
    """Return whether `form_of` takes this tensor: blocks along one of the last two dimensions."""
    ndim = x.dim()
    if ndim == 0 or tile is Tile.TENSOR or not -ndim <= dim < ndim:
        return False
    if tile is Tile.ROW and dim % ndim == ndim - 1:
        return True
    if ndim < 2 or (tile is Tile.ROW and dim % ndim != ndim - 2):
        return False
    # Padding rows in the middle of a tensor would shift the noise of the rows after them.
    return ndim == 2 or x.shape[-2] % BLOCK == 0


def has_kernel(x: Tensor, quantizer: QuantizerDefinition, dim: int) -> bool:
    """Return whether kernels support this quantizer for a tensor, with blocks along `dim`."""
    return (
        quantizer.fmt == NVFP4
        and covers_rule(x.shape, quantizer, dim)
        and has_form(x, quantizer.tile, dim)
        and _padded_count(x.shape) <= MAX_ELEMENTS
    )


def covers(
    x: Tensor,
    quantizer: QuantizerDefinition,
    dim: int,
    dtype: torch.dtype,
    minus: Tensor | None,
    plus: Tensor | None,
) -> bool:
    """Return whether kernels support this call of `fake_quantize`."""
    return (
        has_kernel(x, quantizer, dim)
        and dtype in DTYPES
        and all(t is None or t.dtype is torch.float32 for t in (minus, plus))
        # The reference subtracts from an fp64 tensor in fp64.
        and (minus is None or x.dtype in DTYPES)
    )


def _padded_count(shape: torch.Size) -> int:
    """Return the number of elements with the last two dimensions padded to whole blocks."""
    count = 1
    for place, size in enumerate(reversed(shape)):  # plain code, which torch.compile can trace
        count *= -(-size // BLOCK) * BLOCK if place < 2 else size
    return count


def covers_rule(shape: Sequence[int], quantizer: QuantizerDefinition, dim: int) -> bool:
    """Return whether kernels support the scale rule; padding must not renumber MS-EDEN's blocks."""
    if quantizer.scale_rule is not ScaleRule.EDEN:
        return True
    along_rows = quantizer.tile is Tile.ROW and dim % max(len(shape), 1) == len(shape) - 1
    whole = along_rows or quantizer.tile is Tile.SQUARE or shape[-1] % BLOCK == 0
    return quantizer.rounding is Rounding.NEAREST and whole


def form_of(x: Tensor, tile: Tile, dim: int, *, paired: bool = False) -> Tensor:
    """Pad a tensor with `has_form` to whole blocks and cut it.

    The last dimension is padded even if blocks run along another one, because noise is drawn in
    groups of 16 along it.

    Args:
        x: the tensor.
        tile: shape of its blocks.
        dim: the dimension that row blocks run along.
        paired: whether to pair row blocks, with a block of zeros after an odd number.

    Returns:
        [b 16], [p 2 16] or [g 16 c 16], contiguous.
    """
    along_rows = tile is Tile.ROW and dim % x.dim() == x.dim() - 1
    matrix = x if x.dim() > 1 else x[None]
    columns = -matrix.shape[-1] % BLOCK
    rows = 0 if along_rows else -matrix.shape[-2] % BLOCK
    if rows or columns:
        matrix = F.pad(matrix, (0, columns, 0, rows))
    matrix = matrix.contiguous()
    if not along_rows:
        return matrix.view(-1, BLOCK, matrix.shape[-1] // BLOCK, BLOCK)
    blocks = matrix.view(-1, BLOCK)
    if not paired:
        return blocks
    if len(blocks) % 2:
        blocks = F.pad(blocks, (0, 0, 0, 1))
    return blocks.view(-1, 2, BLOCK)


def packs(shape: Sequence[int], tile: Tile, dim: int) -> bool:
    """Return whether kernels pack a matrix like the reference, which pads only blocked dims."""
    if len(shape) != 2 or tile is Tile.TENSOR:
        return False
    return tile is Tile.SQUARE or in_row_blocks(tile, dim) or shape[1] % BLOCK == 0


def padded_shape(shape: tuple[int, int], tile: Tile, dim: int) -> torch.Size:
    """Return the shape of a matrix that `packs`, padded to whole blocks."""
    rows, columns = shape
    rows += 0 if in_row_blocks(tile, dim) else -rows % BLOCK
    return torch.Size((rows, columns + -columns % BLOCK))
