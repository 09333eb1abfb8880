"""Progress of a comparison: a bar for all steps, a line for each run at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.show.progress import StepPace

_LINE_SECONDS = 120  # between two lines where there are no bars


class RunProgress:
    """Progress of the runs of a comparison; None as the console shows nothing.

    On a terminal these are bars; elsewhere, as in a log file, a line when a run starts, every two
    minutes, and when a run ends. Runs are told apart by their `name`.
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console or Console(quiet=True)
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._reached: dict[str, int] = {}
        self._paces: dict[str, StepPace] = {}
        self._beside: list[float] = []  # seconds of each finished run that were no normal steps
        self._begun: dict[str, float] = {}
        self._total = TaskID(0)
        self._runs = self._done = self._steps = 0
        self._slots = 1
        self._last_line = 0.0

    @contextmanager
    def running(self, runs: Sequence[Any], steps: int, slots: int) -> Iterator[None]:
        """Show the bars while runs are trained, `slots` at a time, `steps` steps each."""
        if not runs:
            yield
            return
        self._runs, self._steps, self._slots = len(runs), steps, slots
        self._last_line = time.monotonic()
        self.console.print(f"{len(runs)} runs of {steps} steps, {slots} at a time.")
        self._bars = Progress(
            TextColumn("{task.description:<32}", markup=False),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:>6}/{task.total}"),
            TextColumn("{task.fields[status]:<22}", markup=False),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        with self._bars:
            self._total = self._bars.add_task("all runs", total=len(runs) * steps, status="")
            yield

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, soft_wrap=True, markup=False)

    def begin(self, run: Any) -> None:
        """Show that a run starts."""
        assert self._bars is not None
        with self._lock:
            self._tasks[run.name] = self._bars.add_task(
                run.name, total=self._steps, status="preparing"
            )
            self._begun[run.name] = time.monotonic()
        if not self.console.is_terminal:
            self.note(f"{run.name} starts")

    def step(self, run: Any, step: int, loss: float | None) -> None:
        """Show that an optimizer step of a run is done."""
        assert self._bars is not None
        with self._lock:
            self._reached[run.name] = step
            self._paces.setdefault(run.name, StepPace()).step(step, time.monotonic())
            shown = "" if loss is None else f"loss {loss:.3f}"
            self._bars.update(self._tasks[run.name], completed=step, status=shown)
            seconds = self._time_left()
            left = "" if seconds is None else "about {}:{:02} left".format(*divmod(seconds, 60))
            done = self._done * self._steps + sum(self._reached.values())
            self._bars.update(self._total, completed=done, status=left)
            due = time.monotonic() - self._last_line >= _LINE_SECONDS
            if due and not self.console.is_terminal:
                self._last_line = time.monotonic()
                of_all = f"step {done} of {self._runs * self._steps} of all runs"
                self.note(
                    f"{of_all}, {left or 'time unknown'}; "
                    + ", ".join(part for part in (f"{run.name}: step {step}", shown) if part)
                )

    def status(self, run: Any, status: str) -> None:
        """Show that a run does something else than training."""
        assert self._bars is not None
        with self._lock:
            self._bars.update(self._tasks[run.name], status=status)

    def finish(self, run: Any, result: SchemeResult | None) -> None:
        """Show that a run has ended, with a result or without."""
        assert self._bars is not None
        with self._lock:
            self._done += 1
            self._reached.pop(run.name, None)
            self._bars.remove_task(self._tasks.pop(run.name))
            seconds = time.monotonic() - self._begun[run.name]
            pace = self._paces[run.name].seconds if run.name in self._paces else None
            if pace is not None:
                self._beside.append(max(0.0, seconds - pace * self._steps))
        shown = "failed" if result is None else f"held-out loss {result.loss:.4f}"
        self.note(f"[{self._done}/{self._runs}] {run.name}: {shown}, {seconds:.0f} s")

    def _time_left(self) -> int | None:
        """Return seconds left: steps at each run's pace, and what goes beside runs to come."""
        paces = {name: p.seconds for name, p in self._paces.items() if p.seconds is not None}
        if not paces:
            return None
        mean = sum(paces.values()) / len(paces)
        beside = sum(self._beside) / len(self._beside) if self._beside else 0.0
        waiting = self._runs - self._done - len(self._tasks)
        work = waiting * (self._steps * mean + beside)
        for name in self._tasks:
            work += (self._steps - self._reached.get(name, 0)) * paces.get(name, mean)
        return round(work / min(self._slots, waiting + len(self._tasks)))
