"""One process at a time in a directory, by a lock that ends with its process.

The lock is the operating system's (`flock`) on the file `.lock`, which says who holds it. Where the
platform or the file system has none, the process that the file names must be gone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"

_held: set[int] = set()  # descriptors of lock files that this process has open


def _let_go() -> None:
    """Close what a fork has inherited: the process that it comes from keeps the lock.

    Workers that a killed process leaves behind would hold its directory as long as they live.
    """
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def hold_directory(directory: str | Path, option: str = "--out") -> Iterator[None]:
    """Hold a directory, which is made if missing, while the block runs.

    Processes that this one starts, forked ones too, do not hold it.

    Args:
        directory: what no other process may write into.
        option: of the command line, which chooses another directory.

    Raises:
        ValueError: another process holds it; the message names that process.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(descriptor)
    try:
        if not _take(descriptor, path):
            raise ValueError(_refusal(directory, _holder(path), option))
        _write(descriptor, json.dumps(_self()))
        try:
            yield
        finally:
            if descriptor in _held:  # not in a fork
                _write(descriptor, "")
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)  # gives the lock back


def _take(descriptor: int, path: Path) -> bool:
    """Return whether this process holds the lock from now on."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return not _alive(_holder(path))


def _alive(holder: dict[str, Any]) -> bool:
    """Return whether the process that a lock file names may be running; True on another host."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    import psutil  # accelerate needs it too

    try:
        # A process of that number that began later is another one.
        return psutil.Process(holder["pid"]).create_time() <= holder["taken"] + 1
    except (psutil.Error, KeyError, TypeError):
        return False


def _self() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "taken": time.time(),
    }


def _holder(path: Path) -> dict[str, Any]:
    """Return what a lock file says about its process; empty if it says nothing."""
    with suppress(OSError, ValueError):
        holder = json.loads(path.read_text("utf-8"))
        if isinstance(holder, dict):
            return holder
    return {}


def _refusal(directory: Path, holder: dict[str, Any], option: str) -> str:
    message = (
        f"{directory} is in use by {_described(holder)}. Wait for that process or end it, or "
        f"choose another {option}"
    )
    if holder.get("host", socket.gethostname()) == socket.gethostname():
        return message
    return f"{message}; if it has ended, delete {directory / LOCK_FILE}"


def _described(holder: dict[str, Any]) -> str:
    if not holder:  # it has the lock and is about to write
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, text.encode())
