"""Live progress of an experiment: scheme, step, loss, time left; plain lines off a terminal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class StepPace:
    """Seconds that a normal step of a run takes, for forecasts.

    The median over the steps seen: the first one, in which kernels are compiled, and those in which
    health is measured take many times as long and say nothing of the others.
    """

    _FEWEST = 3  # intervals, so that one long one is no median

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._costs: list[float] = []

    def step(self, step: int, now: float) -> None:
        """Take note that step `step` was done at `now`, in seconds; some may be left out."""
        if self._last is not None and step > self._last[0]:
            self._costs.append((now - self._last[1]) / (step - self._last[0]))
        self._last = step, now

    @property
    def seconds(self) -> float | None:
        """Seconds for each step; None as long as too few were seen."""
        return statistics.median(self._costs) if len(self._costs) >= self._FEWEST else None


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
            TextColumn("{task.description:<14}", markup=False),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:>4}/{task.total}"),
            TextColumn("{task.fields[status]:<24}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._paces: dict[str, StepPace] = {}  # of the schemes seen so far
        self._current = ""
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
        """Show that a scheme starts."""
        self._current, self._paces[scheme] = scheme, StepPace()
        self._next_line = 0.0
        self._progress.start_task(self._tasks[scheme])
        self._update(status="preparing")

    def step(self, step: int, loss: float | None) -> None:
        """Show that an optimizer step of the running scheme is done."""
        self._paces[self._current].step(step, time.monotonic())
        left = self._time_left(step)
        eta = "" if left is None else "  ETA {}:{:02}".format(*divmod(round(left), 60))
        shown = f"loss {loss:.3f}" if loss is not None else ""
        self._update(completed=step, status=shown + eta)
        share = step / self.steps
        if not self.console.is_terminal and share >= self._next_line:
            self._next_line = share + 0.1
            line = f"{self._current}: step {step}/{self.steps}, {shown}{eta}"
            self.console.print(line, markup=False)

    def evaluating(self) -> None:
        """Show that the running scheme is trained and being evaluated."""
        self._update(completed=self.steps, status="evaluating")

    def finish(self, scheme: str, status: str) -> None:
        """Show that a scheme has its result."""
        self._progress.update(self._tasks[scheme], completed=self.steps, status=status)
        self._progress.stop_task(self._tasks[scheme])
        if not self.console.is_terminal:
            self.console.print(f"{scheme}: {status}", markup=False)

    def _update(self, **kwargs) -> None:
        self._progress.update(self._tasks[self._current], **kwargs)

    def _time_left(self, step: int) -> float | None:
        """Return seconds until the last scheme is trained, at each scheme's normal pace."""
        pace = self._paces[self._current].seconds
        if pace is None:
            return None
        known = [p.seconds for p in self._paces.values() if p.seconds is not None]
        later = self.schemes[self.schemes.index(self._current) + 1 :]
        mean = sum(known) / len(known)
        return pace * (self.steps - step) + mean * self.steps * len(later)
