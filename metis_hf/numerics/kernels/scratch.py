"""Scratch memory of a layer's call on a CUDA device: zeros, and the magnitudes that were found.

A kernel that finds the largest magnitude of a tensor needs a zero to begin with, and to write one
is a launch. The kernel that takes a call's fingerprints, its first one, writes zeros for all. It is
launched again in each replay of a recorded call, and so are the zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from metis_hf.numerics.kernels.layout import Groups

WORDS = 64  # int32 that the kernel writes
FINGERPRINTS = 4  # of them, in front
COUNTERS = 17  # behind these


class Measured(NamedTuple):
    """A tensor whose largest magnitude counts: as it is, or rotated along `dim`.

    With `finite` the largest one that is finite.
    """

    x: Tensor
    groups: Groups | None = None
    dim: int = -1
    finite: bool = False

    @property
    def mark(self) -> Hashable:
        """A mark, in which another tensor, other contents or another rotation differ."""
        signs = None if self.groups is None else self.groups.signs
        known = None if signs is None else (signs.static, id(signs.data))  # which the call holds
        turn = None if self.groups is None else (self.groups.size, known, self.dim % 2)
        return (*_mark(self.x), turn, self.finite)

    def is_of(self, x: Tensor) -> bool:
        """Return whether it is this tensor, rotated or not."""
        return _mark(self.x) == _mark(x)


class Scratch:
    """The zeros of one call, each given out once, and largest magnitudes by tensor."""

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._places = itertools.count(FINGERPRINTS + COUNTERS)  # threads may share it
        self.counters = words[FINGERPRINTS:][:COUNTERS]  # of programs; each launch resets them
        self._known: dict[Hashable, Tensor] = {}
        self._expected: tuple[Measured, ...] = ()

    def zero(self) -> Tensor | None:
        """Return an int32 that is zero, 0-dim; None when none is left."""
        place = next(self._places)
        return self._words[place] if place < WORDS else None

    def amax(self, measured: Measured) -> Tensor | None:
        """Return the magnitude that was kept for this tensor, with the contents it has now."""
        return None if measured.x.is_inference() else self._known.get(measured.mark)

    def keep(self, measured: Measured, amax: Tensor) -> None:
        """Keep the largest magnitude of a tensor."""
        if not measured.x.is_inference():
            self._known[measured.mark] = amax

    def expect(self, *measured: Measured) -> None:
        """Let the next launch that finds a magnitude find the ones of these tensors too.

        They replace the ones that were expected before, and are held until others do.
        """
        self._expected = measured

    def expected(self) -> list[Measured]:
        """Return the tensors that are expected, without those whose magnitude is known."""
        expected = [each for each in self._expected if not each.x.is_inference()]
        return [each for each in expected if each.mark not in self._known]


def zero_of(scratch: Scratch | None, device: torch.device) -> Tensor:
    """Return an int32 that is zero, 0-dim, of the scratch memory or written here."""
    zero = None if scratch is None else scratch.zero()
    return torch.zeros((), dtype=torch.int32, device=device) if zero is None else zero


def counters_of(scratch: Scratch | None, device: torch.device) -> Tensor:
    """Return COUNTERS int32 that are zero, of the scratch memory or written here."""
    if scratch is not None:
        return scratch.counters
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _mark(x: Tensor) -> tuple[Hashable, ...]:
    """Return a mark, in which another tensor or other contents differ.

    A storage's address is given to no other one as long as there is a weak reference to it.
    """
    place = StorageWeakRef(x.untyped_storage()), x.data_ptr(), x._version
    return *place, x.dtype, x.shape, x.stride()
