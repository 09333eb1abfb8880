"""Clean termination: a parent that handles SIGTERM, and children that end with their parent."""

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
_SECONDS = 10  # before a terminated process is killed


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the block, so that cleanup code runs.

    Later SIGTERMs are ignored: `timeout` and schedulers send one to the process and one to its
    group, and the second would interrupt the cleanup. Outside the main thread, which alone can
    handle signals, this does nothing.
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
    raise SystemExit(128 + number)  # exit status of shells


def _go_on(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, child processes do not inherit a handler."""


def end_with_parent() -> None:
    """End this process as soon as the process that started it has ended, for any reason.

    Standard input must be a pipe that the parent keeps open: end of file means that the parent has
    ended, also for processes started by a launcher in between. If standard input is not a pipe,
    the parent is not watched.
    """
    with suppress(OSError):  # closed
        if stat.S_ISFIFO(os.fstat(_STDIN).st_mode):
            threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    with suppress(OSError):
        while os.read(_STDIN, 1):
            pass
    os._exit(1)  # no cleanup: incomplete checkpoints are skipped later


class Children:
    """Running processes, started by several threads and ended by one; standard input is a pipe."""

    def __init__(self) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen] = set()

    def add(self, child: subprocess.Popen) -> None:
        """Add a process; terminate it at once if `end` was called before."""
        with self._lock:
            self._processes.add(child)
            if self.ended:
                _begin_end(child)

    def discard(self, child: subprocess.Popen) -> None:
        """Remove a process that has ended by itself."""
        with self._lock:
            self._processes.discard(child)

    def end(self) -> None:
        """End all processes, including those added later."""
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
