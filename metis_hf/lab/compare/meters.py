"""Meters of a run: step times and peak memory."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

OnStep = Callable[[int, float | None], None]


class PeakMemory:
    """Peak memory since construction, in bytes above the use at construction.

    Measures torch's allocations if there is a CUDA device, else the resident size of the process.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):  # resets the process's peak on Linux
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
    """Return the peak on systems without /proc, where it cannot be reset."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil  # accelerate needs it too

        return psutil.Process().memory_info().peak_wset  # type: ignore[attr-defined]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StepClock(transformers.TrainerCallback):
    """Adds `step_seconds` to each training log entry, then calls `on_step(step, loss)`."""

    def __init__(self, on_step: OnStep) -> None:
        self.on_step = on_step
        self._start = self._seconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        synchronize()
        self._start = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        synchronize()
        self._seconds = time.perf_counter() - self._start

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            state.log_history[-1]["step_seconds"] = self._seconds
            self.on_step(state.global_step, logs["loss"])


def synchronize() -> None:
    """Wait until the accelerator has finished its queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
