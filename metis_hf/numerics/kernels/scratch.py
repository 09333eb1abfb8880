"""Scratch memory of one layer call on a CUDA device: zeroed words, and a cache of magnitudes.

A kernel that finds the largest magnitude of a tensor needs a zeroed word to begin with, and zeroing
one costs a launch. The first kernel of a call, which computes the fingerprints, therefore writes
zeros for all kernels of the call. A replayed CUDA graph launches it again, which renews the zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from metis_hf.numerics.kernels.layout import Groups

WORDS = 64  # int32 words that the fingerprint kernel writes
FINGERPRINTS = 4  # the first words
COUNTERS = 17  # the words after the fingerprints


class Measured(NamedTuple):
    """A largest magnitude to find: of a tensor, or of the tensor rotated along `dim`.

    With `finite`, non-finite entries do not count.
    """

    x: Tensor
    groups: Groups | None = None
    dim: int = -1
    finite: bool = False

    @property
    def mark(self) -> Hashable:
        """Cache key, which differs for another tensor, other contents or another rotation."""
        signs = None if self.groups is None else self.groups.signs
        known = None if signs is None else (signs.static, id(signs.data))  # kept by the call
        turn = None if self.groups is None else (self.groups.size, known, self.dim % 2)
        return (*_mark(self.x), turn, self.finite)

    def is_of(self, x: Tensor) -> bool:
        """Return whether the magnitude is of `x`, rotated or not."""
        return _mark(self.x) == _mark(x)


class Scratch:
    """The zeroed words of one call, each given out once, and a cache of largest magnitudes."""

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._places = itertools.count(FINGERPRINTS + COUNTERS)  # threads may share it
        self.counters = words[FINGERPRINTS:][:COUNTERS]  # of programs; each launch resets them
        self._known: dict[Hashable, Tensor] = {}
        self._expected: tuple[Measured, ...] = ()

    def zero(self) -> Tensor | None:
        """Return an unused zeroed int32, 0-dim; None if none is left."""
        place = next(self._places)
        return self._words[place] if place < WORDS else None

    def amax(self, measured: Measured) -> Tensor | None:
        """Return the cached magnitude of a tensor with its present contents, or None."""
        return None if measured.x.is_inference() else self._known.get(measured.mark)

    def keep(self, measured: Measured, amax: Tensor) -> None:
        """Cache the largest magnitude of a tensor."""
        if not measured.x.is_inference():
            self._known[measured.mark] = amax

    def expect(self, *measured: Measured) -> None:
        """Let the next launch that finds a magnitude find these magnitudes too.

        They replace earlier expectations. Their tensors are kept alive until the next `expect`.
        """
        self._expected = measured

    def expected(self) -> list[Measured]:
        """Return the expected magnitudes that are not yet cached."""
        expected = [each for each in self._expected if not each.x.is_inference()]
        return [each for each in expected if each.mark not in self._known]


def zero_of(scratch: Scratch | None, device: torch.device) -> Tensor:
    """Return a zeroed int32, 0-dim, from the scratch memory or newly allocated."""
    zero = None if scratch is None else scratch.zero()
    return torch.zeros((), dtype=torch.int32, device=device) if zero is None else zero


def counters_of(scratch: Scratch | None, device: torch.device) -> Tensor:
    """Return COUNTERS zeroed int32, from the scratch memory or newly allocated."""
    if scratch is not None:
        return scratch.counters
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _mark(x: Tensor) -> tuple[Hashable, ...]:
    """Return a cache key that differs for another tensor or other contents.

    While a weak reference to a storage exists, no other storage gets its address.
    """
    place = StorageWeakRef(x.untyped_storage()), x.data_ptr(), x._version
    return *place, x.dtype, x.shape, x.stride()
