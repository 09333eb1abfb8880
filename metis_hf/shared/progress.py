"""Live progress of an experiment: scheme, step, loss, time left; plain lines off a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ExperimentProgress:
    """One line per scheme; use it as a context manager.

    Args:
        console: where to print.
        schemes: in the order they run.
        steps: optimizer steps of each.
    """

    def __init__(self, console: Console, schemes: Sequence[str], steps: int) -> None:
        self.console, self.schemes, self.steps = console, list(schemes), steps
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:>4}/{task.total}"),
            TextColumn("{task.fields[status]:<24}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._costs: dict[str, float] = {}  # seconds per step, of the schemes seen so far
        self._current = ""
        self._first = 0
        self._start = 0.0
        self._next_line = 0.0

    def __enter__(self) -> ExperimentProgress:
        self._progress.start()
        for scheme in self.schemes:
            self._tasks[scheme] = self._progress.add_task(
                scheme, total=self.steps, start=False, status="waiting"
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def begin(self, scheme: str) -> None:
        """A scheme starts."""
        self._current, self._first, self._start = scheme, -1, time.monotonic()
        self._next_line = 0.0
        self._progress.start_task(self._tasks[scheme])
        self._update(status="preparing")

    def step(self, step: int, loss: float | None) -> None:
        """An optimizer step of the running scheme is done."""
        now = time.monotonic()
        if self._first < 0:  # the first step of this session, which may be a resumed one
            self._first, self._start = step, now
        elif step > self._first:
            self._costs[self._current] = (now - self._start) / (step - self._first)
        left = self._time_left(step)
        eta = "" if left is None else "  ETA {}:{:02}".format(*divmod(round(left), 60))
        shown = f"loss {loss:.3f}" if loss is not None else ""
        self._update(completed=step, status=shown + eta)
        share = step / self.steps
        if not self.console.is_terminal and share >= self._next_line:
            self._next_line = share + 0.1
            self.console.print(f"{self._current}: step {step}/{self.steps}, {shown}{eta}")

    def evaluating(self) -> None:
        """The running scheme is trained and being evaluated."""
        self._update(completed=self.steps, status="evaluating")

    def finish(self, scheme: str, status: str) -> None:
        """A scheme has its result."""
        self._progress.update(self._tasks[scheme], completed=self.steps, status=status)
        self._progress.stop_task(self._tasks[scheme])
        if not self.console.is_terminal:
            self.console.print(f"{scheme}: {status}")

    def _update(self, **kwargs) -> None:
        self._progress.update(self._tasks[self._current], **kwargs)

    def _time_left(self, step: int) -> float | None:
        """Seconds until the last scheme is trained, from the mean cost of the steps so far."""
        if self._current not in self._costs:
            return None
        later = self.schemes[self.schemes.index(self._current) + 1 :]
        mean = sum(self._costs.values()) / len(self._costs)
        return self._costs[self._current] * (self.steps - step) + mean * self.steps * len(later)
