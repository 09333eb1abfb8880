"""Quantization error under a given tensor scale, estimated on a sample of a layer's input.

A tensor scale acts through the rounding of block scales, so the sample consists of whole blocks. It
has the blocks with the largest magnitudes of all batches, since a scale that is too small clips
only these and a few may hold most of the error, and blocks spread over all rows and channels, which
represent the rest. The choice of blocks does not depend on the order of the batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.numerics import Quantizer, Tile

LARGEST, SPREAD = 1 << 12, 1 << 14  # most blocks kept of each kind
_HASH = 0x9E3779B1  # odd, 2^32 / golden ratio: its multiples spread evenly


class BlockSample:
    """A sample of a quantizer's blocks of rows [t i], which are added batch by batch."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.seen = 0  # number of blocks
        self._largest: list[Tensor] = []  # blocks [n size], their keys [n]
        self._spread: list[Tensor] = []  # blocks [n size], hashes of their positions [n]
        self._below = 1 << 32  # blocks with smaller position hashes are kept
        self._last: weakref.ref[Tensor] | None = None

    def add(self, x: Tensor, source: Tensor) -> None:
        """Add finite rows x [t i] of an input; layers that share the input `source` add it once."""
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
        """Return the estimated squared error of all rows under the tensor scale of each amax."""
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
        # Sorted, so that the sum does not depend on the order of blocks.
        return error.sum(1, dtype=torch.float64).sort().values.sum().item()


def _join(kept: list[Tensor], blocks: Tensor, marks: Tensor) -> list[Tensor]:
    return [torch.cat(pair) for pair in zip(kept, (blocks, marks))] if kept else [blocks, marks]


def _keys(blocks: Tensor) -> Tensor:
    """Return int64 keys [n]: a block's largest magnitude, then a hash of its content for ties."""
    bits = blocks.float().view(torch.int32)
    odd = torch.arange(1, 2 * blocks.shape[1], 2, device=blocks.device) * _HASH
    content = (bits * odd).sum(1)
    content = (content ^ content >> 32) & 0x7FFFFFFF
    return blocks.abs().amax(1).float().view(torch.int32).long() << 31 | content
