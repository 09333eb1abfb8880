"""Progress of a command's tasks: bars with the time left, or lines in a log file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LINE_SECONDS = 120  # minimum time between two progress lines without a terminal
_FEW = 3  # tasks with more items exclude their first timing from the forecast


@dataclass
class _Task:
    total: int
    cost: float
    done: int = 0
    ended: bool = False
    bar: TaskID | None = None  # set once the task has begun
    begun: float = 0.0
    last: float = 0.0
    timed: int = 0  # number of timed items
    seconds: float = 0.0  # total time of the timed items
    first: tuple[int, float] | None = None  # first (items, seconds), with kernel compilation

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

    On a terminal there is one bar for all tasks and one for each running task. Elsewhere, such as
    in a log file, a line is printed when a task begins, then at most every two minutes, and when a
    task has a result.

    Example:
        >>> from rich.console import Console
        >>> progress = TaskProgress(Console())
        >>> with progress.running({"loss": (2, 1.0), "gradients": (1, 3.0)}):
        ...     progress.advance("loss")
        ...     progress.finish("loss", "4.21")
        loss begins
        [1/2] loss: 4.21, 0 s

    Without a console, nothing is printed.
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
        self._beside: list[float] = []  # seconds that each ended task spent outside its items
        self._last = self._last_line = 0.0

    @contextmanager
    def running(self, tasks: Mapping[str, tuple[int, float]], slots: int = 1) -> Iterator[None]:
        """Show the bars while tasks run.

        Args:
            tasks: name -> (number of items, relative cost of an item). The forecast uses the costs
                until a task's own items have been timed. Tasks without items are left out.
            slots: tasks that run at the same time; with one, tasks may still take turns.
        """
        self._tasks = {name: _Task(*task) for name, task in tasks.items() if task[0]}
        self._slots, self._beside = slots, []
        self._last = self._last_line = time.monotonic()
        total = sum(task.total for task in self._tasks.values())
        self._bars.reset(self._all, total=total, visible=bool(total))
        with self._bars:
            yield

    def note(self, text: str) -> None:
        """Print a permanent line."""
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def begin(self, name: str, status: str = "") -> None:
        """Show that a task begins; `advance` calls this for a task that has not begun."""
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
            name: name of the task.
            done: total number of finished items; None adds one.
            status: text next to the bar, such as the loss.
            reused: the items were already available, so their time is not counted.
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
        """Set the text next to the bar of a task that has begun."""
        with self._lock:
            bar = self._tasks[name].bar
            if bar is not None:
                self._bars.update(bar, status=status)

    def finish(self, name: str, result: str = "") -> None:
        """Show that a task has ended, possibly with fewer items than expected.

        The result is printed as a permanent line. A task without items is ignored.
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
        """Return the start time of the running item; tasks that take turns share one clock."""
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
        """Return the estimated seconds until all tasks end; None until an item has been timed."""
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
