"""Processes that end together: a parent that hears SIGTERM, and children that outlive no parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_STDIN = 0
_SECONDS = 10  # that a process may take to end before it is killed


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the block, so that what is under way is cleaned up.

    The first does; those that follow change nothing, since `timeout` and schedulers send one to
    the process and another to its group, and the second would break off the cleaning up. Signals
    reach the main thread only: elsewhere the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _go_on)
    raise SystemExit(128 + number)  # as a shell says it


def _go_on(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, a handler is not what processes started later inherit."""


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, however that came.

    Standard input must be a pipe that the parent keeps open and never writes to: its end says that
    the parent is gone, to the processes that a launcher starts in between too. A launcher may give
    its processes another standard input; then nothing is watched.
    """
    with suppress(OSError):  # closed
        if stat.S_ISFIFO(os.fstat(_STDIN).st_mode):
            threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    with suppress(OSError):
        while os.read(_STDIN, 1):
            pass
    os._exit(1)  # no cleaning up: checkpoints are found whole or passed over


class Children:
    """Processes at work that several threads start and one ends; standard input is a pipe."""

    def __init__(self) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen] = set()

    def add(self, child: subprocess.Popen) -> None:
        """Count a process among them; it is ended at once where the others were."""
        with self._lock:
            self._processes.add(child)
            if self.ended:
                _begin_end(child)

    def discard(self, child: subprocess.Popen) -> None:
        """Leave out a process that has ended by itself."""
        with self._lock:
            self._processes.discard(child)

    def end(self) -> None:
        """End them all, and those to come."""
        with self._lock:
            self.ended = True
            processes = list(self._processes)
        for child in processes:
            _begin_end(child)
        for child in processes:
            try:
                child.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()


def _begin_end(child: subprocess.Popen) -> None:
    child.terminate()
    if child.stdin is not None:
        with suppress(OSError):
            child.stdin.close()
