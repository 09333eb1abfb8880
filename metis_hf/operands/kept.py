"""Values that are kept for as long as the tensors they were made of stay as they are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Mark = tuple[Hashable, ...]


def mark_of(*tensors: Tensor) -> Mark:
    """Return a mark of tensors, which differs once they are written to or moved.

    The version counter misses writes through `tensor.data`, from numpy, by fused optimizers and by
    collectives of torch.distributed. Where these may happen, a fingerprint (`noise.fingerprint`)
    belongs beside the mark. The weak reference to a storage keeps no memory, and its address is
    given to no other storage.
    """
    return tuple(
        (
            StorageWeakRef(each.untyped_storage()),
            each.data_ptr(),
            each.dtype,
            each._version,  # inference tensors have none
        )
        for each in tensors
    )


class Kept:
    """Values by name, all made of tensors with one mark.

    Threads may share it, as mark and values are replaced together. A copy is empty.
    """

    def __init__(self) -> None:
        self._state: tuple[Mark, dict[Hashable, Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __len__(self) -> int:
        return 0 if self._state is None else len(self._state[1])

    def __bool__(self) -> bool:
        return True  # an empty one is a cache, too

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is kept, not even a mark."""
        return self._state is None

    def at(self, mark: Mark) -> dict[Hashable, Any] | None:
        """Return the values made at a mark, to be read and added to; None at another mark."""
        state = self._state
        return state[1] if state is not None and state[0] == mark else None

    def start(self, mark: Mark) -> dict[Hashable, Any]:
        """Drop everything, and return the dictionary of values for a new mark."""
        values: dict[Hashable, Any] = {}
        self._state = mark, values
        return values

    def forget(self, values: dict[Hashable, Any] | None = None) -> None:
        """Drop everything; given `values`, only if those are the ones that are kept."""
        state = self._state
        if values is None or (state is not None and state[1] is values):
            self._state = None
