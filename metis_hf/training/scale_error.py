"""The error that a tensor scale leaves, measured on a sample of a layer's input.

The scale of a tensor enters through the rounding of its block scales, so that the elements of a
block belong together: whole blocks are kept. The largest of all batches are kept, since a scale
that is too small clips them alone, and a few may hold most of the error; and others, spread over
all rows and channels, that stand for the rest. Which ones are kept does not depend on the order of
the batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.numerics import Quantizer, Tile

LARGEST, SPREAD = 1 << 12, 1 << 14  # blocks that are kept, at most
_HASH = 0x9E3779B1  # odd, 2^32 over the golden ratio: its multiples are spread evenly


class BlockSample:
    """A sample of the blocks of rows [t i] that are added one batch after the other.

    Args:
        quantizer: of the rows.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.seen = 0  # blocks
        self._largest: list[Tensor] = []  # blocks [n size], and their keys
        self._spread: list[Tensor] = []  # blocks [n size], and the hashes of their positions
        self._below = 1 << 32  # of hashes
        self._last: weakref.ref[Tensor] | None = None

    def add(self, x: Tensor, source: Tensor) -> None:
        """Take up rows x [t i], finite, of an input that several layers may read: once."""
        if not x.numel() or (self._last is not None and self._last() is source):
            return
        self._last = weakref.ref(source)
        size = self.quantizer.fmt.block_size
        if size is None or self.quantizer.tile is not Tile.ROW:
            size = x.shape[1]
        blocks = F.pad(x, (0, -x.shape[1] % size)).view(-1, size)
        self.seen += len(blocks)
        amax = blocks.abs().amax(1)
        found = blocks[amax >= amax.topk(min(LARGEST, len(amax))).values[-1]]
        self._largest = _join(self._largest, found, _keys(found))
        if len(self._largest[1]) > LARGEST:
            kept = self._largest[1].topk(LARGEST).indices
            self._largest = [each[kept] for each in self._largest]
        hashes = torch.arange(len(blocks), device=x.device) * _HASH & 0xFFFFFFFF
        kept = hashes < self._below
        self._spread = _join(self._spread, blocks[kept], hashes[kept])
        while len(self._spread[1]) > SPREAD:
            self._below //= 2
            kept = self._spread[1] < self._below
            self._spread = [each[kept] for each in self._spread]

    def errors(self, amaxes: Sequence[float]) -> list[float]:
        """Return the squared error of all rows under tensor scales made of each amax."""
        if not self.seen:
            return [0.0] * len(amaxes)
        parts = [(self._largest[0].float(), 1.0)]
        if self.seen > LARGEST:
            blocks = self._spread[0]
            others = blocks[_keys(blocks) < self._largest[1].min()].float()
            parts.append((others, (self.seen - LARGEST) / max(len(others), 1)))
        return [sum(times * self._error(part, amax) for part, times in parts) for amax in amaxes]

    def _error(self, blocks: Tensor, amax: float) -> float:
        error = self.quantizer(blocks, amax=blocks.new_tensor(amax)).sub_(blocks).square_()
        # Sorted, so that the sum is the same in any order.
        return error.sum(1, dtype=torch.float64).sort().values.sum().item()


def _join(kept: list[Tensor], blocks: Tensor, marks: Tensor) -> list[Tensor]:
    return [torch.cat(pair) for pair in zip(kept, (blocks, marks))] if kept else [blocks, marks]


def _keys(blocks: Tensor) -> Tensor:
    """Return int64 keys [n] in the order of the blocks' largest magnitudes; no others are equal."""
    bits = blocks.float().view(torch.int32)
    odd = torch.arange(1, 2 * blocks.shape[1], 2, device=blocks.device) * _HASH
    content = (bits * odd).sum(1)
    content = (content ^ content >> 32) & 0x7FFFFFFF
    return blocks.abs().amax(1).float().view(torch.int32).long() << 31 | content
