"""A cache of values that are valid until the tensors that they were computed from change."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Mark = tuple[Hashable, ...]


def mark_of(*tensors: Tensor) -> Mark:
    """Return a mark of tensors, which changes when one is written to or moved.

    The version counter misses writes through `tensor.data`, from numpy, by fused optimizers and by
    collectives of torch.distributed. Where these may happen, add a fingerprint
    (`noise.fingerprint`) to the mark. The weak reference to a storage keeps no memory alive, but no
    other storage can get its address.
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
    """A cache of values by name, all computed from tensors with one mark.

    Threads may share it, because mark and values are replaced together. A copy is empty.
    """

    def __init__(self) -> None:
        self._state: tuple[Mark, dict[Hashable, Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __len__(self) -> int:
        return 0 if self._state is None else len(self._state[1])

    def __bool__(self) -> bool:
        return True  # an empty cache is still a cache

    @property
    def is_empty(self) -> bool:
        """Return whether the cache has no mark."""
        return self._state is None

    def at(self, mark: Mark) -> dict[Hashable, Any] | None:
        """Return the dictionary of values for a mark, to read and to add to; None: another mark."""
        state = self._state
        return state[1] if state is not None and state[0] == mark else None

    def start(self, mark: Mark) -> dict[Hashable, Any]:
        """Clear the cache, and return the dictionary of values for a new mark."""
        values: dict[Hashable, Any] = {}
        self._state = mark, values
        return values

    def forget(self, values: dict[Hashable, Any] | None = None) -> None:
        """Clear the cache; given `values`, only if that is the cached dictionary."""
        state = self._state
        if values is None or (state is not None and state[1] is values):
            self._state = None
