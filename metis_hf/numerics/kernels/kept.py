"""Marks of the programs that Inductor keeps on disk: reading these takes a fraction of a second.

Its cache cannot be asked without tracing a program. So each one that was compiled leaves a file of
no content beside the cache, named after the program and after the code that it was made from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import Any

import torch


def is_kept(program: Any) -> bool:
    """Return whether a program was compiled on this machine, with this code and this torch."""
    return _mark(program).exists()


def keep(program: Any) -> None:
    """Leave the mark of a program that has been compiled; a disk that takes none is no error."""
    mark = _mark(program)
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def directory() -> Path:
    """Return where Inductor keeps compiled code."""
    from torch._inductor.codecache import cache_dir  # takes a second to import

    return Path(cache_dir())


def _mark(program: Any) -> Path:
    name = hashlib.sha256(repr(program).encode()).hexdigest()[:32]
    return directory() / "metis_hf" / _version() / name


@functools.cache
def _version() -> str:
    """Name the code that programs are made from."""
    numerics = Path(__file__).parents[1]
    digest = hashlib.sha256(torch.__version__.encode())
    for path in [*sorted(numerics.rglob("*.py")), numerics.parent / "noise.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
