"""Cutting a tensor into blocks of elements that share a scale, and reassembling it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


class Tile(str, enum.Enum):
    """Shape of a block."""

    ROW = "row"  # 1 x block_size along one dimension; without a block size, the whole row
    SQUARE = "square"  # block_size x block_size over the last two dims; a transpose keeps blocks
    TENSOR = "tensor"  # one block


def block_dims(tile: Tile, ndim: int, dim: int) -> tuple[int, ...]:
    """Return the dimensions of `to_blocks`' result that lie inside a block."""
    if tile is Tile.TENSOR:
        return tuple(range(max(ndim, 1)))
    if tile is Tile.SQUARE:
        return (-3, -1)
    return (dim % max(ndim, 1) + 1,)


def to_blocks(x: Tensor, tile: Tile, size: int | None, dim: int) -> Tensor:
    """Cut [.. n ..] into [.. ceil(n/size) size ..], zero-padded along blocked dimensions only."""
    x = x.reshape(1) if x.dim() == 0 else x
    if tile is Tile.TENSOR:
        return x.contiguous()
    if tile is Tile.SQUARE:
        assert size is not None
        if x.dim() < 2:
            raise ValueError(
                f'tile="square" needs a matrix, got shape {tuple(x.shape)}; use tile="row"'
            )
        x = F.pad(x, (0, -x.shape[-1] % size, 0, -x.shape[-2] % size))
        return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).contiguous()
    dim %= x.dim()
    size = size or x.shape[dim]
    pad = -x.shape[dim] % size
    if pad:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, pad])
    return x.unflatten(dim, (-1, size)).contiguous()


def from_blocks(blocks: Tensor, shape: Sequence[int], tile: Tile, dim: int) -> Tensor:
    """Invert `to_blocks`, and drop the padding."""
    if not shape:
        return blocks.flatten()[0]
    if tile is Tile.TENSOR:
        return blocks
    if tile is Tile.SQUARE:
        x = blocks.flatten(-4, -3).flatten(-2, -1)
        return x[..., : shape[-2], : shape[-1]]
    dim %= len(shape)
    x = blocks.flatten(dim, dim + 1)
    return x if x.shape[dim] == shape[dim] else x.narrow(dim, 0, shape[dim])
