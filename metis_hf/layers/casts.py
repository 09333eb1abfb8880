"""Buffers that keep their dtype when a model is cast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@contextmanager
def as_integers(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """View buffers of a module as integers of the same size inside the block.

    Casts of a model (.to(torch.bfloat16), .half()) skip integers; moves between devices do not.
    """
    dtypes = {name: module.get_buffer(name).dtype for name in names}
    for name, dtype in dtypes.items():
        setattr(module, name, module.get_buffer(name).view(_INTEGERS[dtype.itemsize]))
    try:
        yield
    finally:  # also after an out-of-memory error
        for name, dtype in dtypes.items():
            setattr(module, name, module.get_buffer(name).view(dtype))
