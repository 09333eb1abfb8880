"""Memory of a layer's quantized operands on CPUs, which the next layers use again.

Operands live no longer than a call. Freed, a tensor of this size goes back to the system, which
clears each new page: that takes longer than quantizing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_LEAST = 2**20  # bytes; the allocator itself keeps smaller pieces


class _Thread(threading.local):
    def __init__(self) -> None:
        self.free: list[Tensor] = []  # uint8
        self.active: Workspace | None = None


_thread = _Thread()


class Workspace:
    """The memory of one call of a layer: inside `with`, `take` takes from it.

    Args:
        x: the call's input or gradient; without a plain CPU tensor all memory is new.
    """

    def __init__(self, x: Tensor) -> None:
        plain = not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)
        self._usable = plain and x.device.type == "cpu"
        self._taken: dict[int, Tensor] = {}  # by address
        self._before: Workspace | None = None

    def __enter__(self) -> None:
        if self._usable:
            self._before, _thread.active = _thread.active, self

    def __exit__(self, *_: object) -> None:
        if self._usable:
            _thread.active = self._before

    def release(self, kept: Iterable[Tensor | None] = ()) -> None:
        """Let later calls use all memory in which no `kept` tensor lies."""
        for x in kept:
            if x is not None and self.holds(x):
                del self._taken[x.untyped_storage().data_ptr()]
        _thread.free += self._taken.values()
        self._taken.clear()

    def holds(self, x: Tensor) -> bool:
        """Return whether the memory of x was taken from here."""
        return bool(self._taken) and x.untyped_storage().data_ptr() in self._taken

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return memory of that shape, None if it is small."""
        size, free = math.prod(shape) * dtype.itemsize, _thread.free
        if size < _LEAST:
            return None
        free.sort(key=len, reverse=True)  # of equal ones the last released stay behind the others
        fitting = sum(len(each) >= size for each in free)
        if fitting:
            memory = free.pop(fitting - 1)
        else:
            del free[:1]  # the new memory does what the largest one did, and more
            with torch.inference_mode(False):  # later calls may train
                memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._taken[memory.data_ptr()] = memory
        return memory[:size].view(dtype).view(shape)


def take(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Return memory from the workspace of the `with` block in force; None without one."""
    if torch.compiler.is_compiling():
        return None
    active = _thread.active
    return None if active is None else active.take(shape, dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a [m n] @ b [.. n p], in memory from the workspace of the `with` block in force."""
    out = take((*b.shape[:-2], a.shape[-2], b.shape[-1]), a.dtype)
    return torch.matmul(a, b, out=out)


def own(x: Tensor) -> Tensor | None:
    """Return x if its memory comes from the workspace of the `with` block in force, else None."""
    if torch.compiler.is_compiling() or _thread.active is None:
        return None
    return x if _thread.active.holds(x) else None
