"""The memory that a run takes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch


class PeakMemory:
    """The most memory in use since this was made, in bytes, beyond what was in use then.

    On an accelerator what is allocated there, else the size of the process.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):  # Linux resets the process's peak on this
            Path("/proc/self/clear_refs").write_text("5")
        self._start = self._peak()

    def bytes(self) -> int:
        """Return the peak so far."""
        return self._peak() - self._start

    @staticmethod
    def _peak() -> int:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        try:
            status = Path("/proc/self/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            return _peak_of_process()


def _peak_of_process() -> int:
    """Return the peak where there is no /proc: nothing resets it there."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil  # accelerate needs it too

        return psutil.Process().memory_info().peak_wset  # type: ignore[attr-defined]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
