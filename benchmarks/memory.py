"""Memory in benchmarks: the peak during a block, and sizes as text."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Yield {"bytes": peak inside the block, above the use before}; empty if not measurable."""
    found: dict[str, int] = {}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found["bytes"] = torch.cuda.max_memory_allocated(device) - before
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        resident = _status("VmRSS")
    except OSError:
        yield found
        return
    yield found
    found["bytes"] = _status("VmHWM") - resident


def _status(field: str) -> int:
    """Return a size from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f}" if size > 2**20 else f"{size / 2**20:.2f}"
