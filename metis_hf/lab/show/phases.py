"""Progress of a command in phases: a bar for each and the time left; plain lines off a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@dataclass
class _Phase:
    total: int
    cost: float
    task: TaskID
    done: int = 0
    timed: int = 0  # of those done: the ones that took time
    seconds: float = 0.0
    next_line: float = 0.0


class PhaseProgress:
    """One line per phase; use it as a context manager.

    Args:
        console: where to print.
        phases: name -> (items, what one of them costs against one of another phase). The costs
            serve the time left until a phase has a time of its own.
    """

    def __init__(self, console: Console, phases: Mapping[str, tuple[int, float]]) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:>4}/{task.total}"),
            TextColumn("{task.fields[status]:<16}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._phases = {
            name: _Phase(total, cost, self._bars.add_task(name, False, total, status=""))
            for name, (total, cost) in phases.items()
            if total
        }
        self._last = time.monotonic()

    def __enter__(self) -> PhaseProgress:
        self._bars.start()
        self._last = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def advance(self, name: str, *, reused: bool = False) -> None:
        """Count one item of a phase as done; all time since the last call was spent on it.

        Args:
            name: of the phase.
            reused: the item was there already, and its time says nothing of the next one's.
        """
        phase, now = self._phases[name], time.monotonic()
        phase.done = min(phase.done + 1, phase.total)
        if not reused:
            phase.seconds += now - self._last
            phase.timed += 1
            self._last = now
        left = self._time_left()
        eta = "" if left is None else "ETA {}:{:02}".format(*divmod(round(left), 60))
        self._bars.start_task(phase.task)
        self._bars.update(phase.task, completed=phase.done, status=eta)
        share = phase.done / phase.total
        if not self.console.is_terminal and not reused and share >= phase.next_line:
            phase.next_line = share + 0.1
            self.console.print(f"{name}: {phase.done}/{phase.total}" + f", {eta}" * bool(eta))

    def finish(self, name: str) -> None:
        """Count all items of a phase as done: there were fewer than expected."""
        if name in self._phases:
            phase = self._phases[name]
            phase.done = phase.total
            self._bars.update(phase.task, completed=phase.total, status="")

    def _time_left(self) -> float | None:
        """Return the seconds until everything is done, by the times so far."""
        spent = sum(phase.seconds for phase in self._phases.values())
        paid = sum(phase.timed * phase.cost for phase in self._phases.values())
        if not paid:
            return None
        return sum(
            (phase.total - phase.done)
            * (phase.seconds / phase.timed if phase.timed else phase.cost * spent / paid)
            for phase in self._phases.values()
        )
