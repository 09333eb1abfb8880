"""Scratch memory of a layer's call on a CUDA device: zeros, and the magnitudes that were found.

A kernel that finds the largest magnitude of a tensor needs a zero to begin with, and to write one
is a launch. The kernel that takes a call's fingerprints, its first one, writes zeros for all. It is
launched again in each replay of a recorded call, and so are the zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

WORDS = 32  # int32 that the kernel writes
FINGERPRINTS = 4  # of them, in front


class Scratch:
    """The zeros of one call, each given out once, and largest magnitudes by tensor."""

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._places = itertools.count(FINGERPRINTS)  # threads may share it
        self._known: dict[Hashable, Tensor] = {}

    def zero(self) -> Tensor | None:
        """Return an int32 that is zero, 0-dim; None when none is left."""
        place = next(self._places)
        return self._words[place] if place < WORDS else None

    def amax(self, x: Tensor) -> Tensor | None:
        """Return the magnitude that was kept for this tensor, with the contents it has now."""
        return None if x.is_inference() else self._known.get(_mark(x))

    def keep(self, x: Tensor, amax: Tensor) -> None:
        """Keep the largest magnitude of a tensor."""
        if not x.is_inference():
            self._known[_mark(x)] = amax


def _mark(x: Tensor) -> Hashable:
    """Return a mark, in which another tensor or other contents differ.

    A storage's address is given to no other one as long as there is a weak reference to it.
    """
    place = StorageWeakRef(x.untyped_storage()), x.data_ptr(), x._version
    return *place, x.dtype, x.shape, x.stride()
