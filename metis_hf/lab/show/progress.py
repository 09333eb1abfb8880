"""Progress of a command's tasks: bars and the time left; lines in a log file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LINE_SECONDS = 120  # between two lines where there are no bars
_FEW = 3  # items; a task of more leaves its first timing out of the forecast


@dataclass
class _Task:
    total: int
    cost: float
    done: int = 0
    ended: bool = False
    bar: TaskID | None = None  # of a task that has begun
    begun: float = 0.0
    last: float = 0.0
    timed: int = 0  # items
    seconds: float = 0.0  # of the timed items
    first: tuple[int, float] | None = None  # items and seconds, with kernels being compiled

    def add(self, items: int, seconds: float) -> None:
        if self.first is None and self.total > _FEW:
            self.first = items, seconds
        else:
            self.timed, self.seconds = self.timed + items, self.seconds + seconds

    @property
    def pace(self) -> float | None:
        return self.seconds / self.timed if self.timed else None

    @property
    def left(self) -> int:
        return 0 if self.ended else self.total - self.done


class TaskProgress:
    """Shows tasks that consist of items, such as training runs and their steps.

    On a terminal there is a bar for all tasks and one for each that is at work. Elsewhere, as in a
    log file, there is a line where a task begins, one at most every two minutes, and one where a
    task has a result.

    Example:
        >>> from rich.console import Console
        >>> progress = TaskProgress(Console())
        >>> with progress.running({"loss": (2, 1.0), "gradients": (1, 3.0)}):
        ...     progress.advance("loss")
        ...     progress.finish("loss", "4.21")
        loss begins
        [1/2] loss: 4.21, 0 s

    Args:
        console: where to print; None prints nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console or Console(quiet=True)
        self._lock = threading.RLock()
        self._bars = Progress(
            TextColumn("{task.description:<32}", markup=False),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:>6}/{task.total}"),
            TextColumn("{task.fields[status]:<22}", markup=False),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._all = self._bars.add_task("all", status="", visible=False)
        self._tasks: dict[str, _Task] = {}
        self._slots = 1
        self._beside: list[float] = []  # seconds that each ended task spent beside its items
        self._last = self._last_line = 0.0

    @contextmanager
    def running(self, tasks: Mapping[str, tuple[int, float]], slots: int = 1) -> Iterator[None]:
        """Show the bars while tasks are at work.

        Args:
            tasks: name -> (items, what an item costs relative to an item of another task). The
                costs serve the forecast until a task's own items have been timed. Tasks without
                items are left out.
            slots: tasks at work at the same time; with one, tasks may still take turns.
        """
        self._tasks = {name: _Task(*task) for name, task in tasks.items() if task[0]}
        self._slots, self._beside = slots, []
        self._last = self._last_line = time.monotonic()
        total = sum(task.total for task in self._tasks.values())
        self._bars.reset(self._all, total=total, visible=bool(total))
        with self._bars:
            yield

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def begin(self, name: str, status: str = "") -> None:
        """Show that a task begins; `advance` does so for a task that has not begun."""
        with self._lock:
            task = self._tasks[name]
            task.begun = task.last = time.monotonic()
            task.bar = self._bars.add_task(name, total=task.total, status=status)
        if not self.console.is_terminal:
            self.note(f"{name} begins")

    def advance(
        self, name: str, done: int | None = None, *, status: str = "", reused: bool = False
    ) -> None:
        """Show that items of a task are done.

        Args:
            name: of the task.
            done: items that are done; None adds one.
            status: shown beside the bar, such as the loss.
            reused: the items were there already, and their time says nothing about the others.
        """
        with self._lock:
            task, now = self._tasks[name], time.monotonic()
            if task.bar is None:
                self.begin(name)
            items = (task.done + 1 if done is None else done) - task.done
            task.done = min(task.done + items, task.total)
            if not reused and items > 0:
                task.add(items, now - self._since(task))
                task.last = self._last = now
            self._update(task, status)
            if not reused and not self.console.is_terminal:
                self._say(name, status, now)

    def status(self, name: str, status: str) -> None:
        """Show what a task does beside its items."""
        with self._lock:
            bar = self._tasks[name].bar
            if bar is not None:
                self._bars.update(bar, status=status)

    def finish(self, name: str, result: str = "") -> None:
        """Show that a task has ended, maybe with fewer items than expected.

        Args:
            name: of the task; a name without items is ignored.
            result: printed in a line that stays.
        """
        with self._lock:
            task, now = self._tasks.get(name), time.monotonic()
            if task is None or task.ended:
                return
            task.ended = True
            if task.pace is not None:
                items, seconds = task.first or (0, 0.0)
                beside = max(0.0, seconds - items * task.pace)
                self._beside.append(beside + now - self._since(task))
            task.last = self._last = now
            self._update(task, "")
            if task.bar is not None:
                self._bars.remove_task(task.bar)
            ended = sum(each.ended for each in self._tasks.values())
            if result:
                took = f"{now - task.begun:.0f} s"
                self.note(f"[{ended}/{len(self._tasks)}] {name}: {result}, {took}")

    def _since(self, task: _Task) -> float:
        """Return when the running item began; tasks that take turns share one clock."""
        return task.last if self._slots > 1 else self._last

    def _update(self, task: _Task, status: str) -> None:
        if task.bar is not None:
            self._bars.update(task.bar, completed=task.done, status=status)
        done = sum(each.total - each.left for each in self._tasks.values())
        self._bars.update(self._all, completed=done, status=self._left_text())

    def _say(self, name: str, status: str, now: float) -> None:
        if now - self._last_line < _LINE_SECONDS:
            return
        self._last_line = now
        task = self._tasks[name]
        parts = (f"{name}: {task.done}/{task.total}", status, self._left_text() or "time unknown")
        self.note(", ".join(part for part in parts if part))

    def _left_text(self) -> str:
        seconds = self._time_left()
        return "" if seconds is None else "about {}:{:02} left".format(*divmod(seconds, 60))

    def _time_left(self) -> int | None:
        """Return the seconds until all tasks have ended; None as long as no item was timed."""
        paced = [(task, task.pace) for task in self._tasks.values()]
        known = [(pace, task.cost) for task, pace in paced if pace is not None]
        if not known:
            return None
        unit = sum(pace for pace, _ in known) / sum(cost for _, cost in known)
        work = sum(task.left * (task.cost * unit if p is None else p) for task, p in paced)
        open_tasks = [task for task, _ in paced if not task.ended]
        if self._beside:
            waiting = sum(task.bar is None for task in open_tasks)
            work += waiting * sum(self._beside) / len(self._beside)
        return round(work / max(1, min(self._slots, len(open_tasks))))
