"""File locks for directories and parts of directories, released when their process ends."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import filelock

from metis_hf.shared.records import read_json, write_json

LOCK_FILE = ".lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def hold_directory(directory: str | Path, option: str = "--out") -> AbstractContextManager[None]:
    """Hold the lock of a directory, created if missing, while the block runs; see `hold`."""
    return hold(Path(directory) / LOCK_FILE, option=option)


@contextmanager
def hold(
    path: Path, seconds: float = 0, *, option: str = "--out", what: Path | None = None
) -> Iterator[None]:
    """Hold a lock file while the block runs.

    The operating system releases the lock when the process ends. Child processes, including forks,
    do not hold the lock. A JSON file next to the lock file names the holder.

    Args:
        path: the lock, `DIRECTORY/.lock` for a directory and `DIRECTORY/.NAME.lock` for a part.
        seconds: timeout to wait for another holder.
        option: of the command line that chooses another directory, for the message.
        what: the locked path, for the message; None: derived from the lock's name.

    Raises:
        ValueError: another process holds the lock (the message names it), or the lock is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.exists() and path.stat().st_nlink > 1):
        raise ValueError(f"{path} is a link to another file, which a lock would change; delete it")
    lock: filelock.BaseFileLock = filelock.FileLock(path, timeout=seconds)
    try:
        try:
            lock.acquire()
        except OSError as error:
            if isinstance(error, filelock.Timeout) or error.errno not in _NO_LOCKS:
                raise
            # A network file system without locks: the existence of a file serves as the lock.
            lock = filelock.SoftFileLock(f"{path}.soft", timeout=seconds)
            lock.acquire()
    except filelock.Timeout:
        raise ValueError(_refusal(path, Path(lock.lock_file), option, what)) from None
    holder, process = _holder_file(path), os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        write_json(holder, {"pid": process, "host": socket.gethostname(), "since": since})
        yield
    finally:
        if os.getpid() == process:  # a fork that leaves the block does not hold the lock
            holder.unlink(missing_ok=True)
        lock.release()


def _refusal(path: Path, lock: Path, option: str, what: Path | None) -> str:
    try:
        holder = read_json(_holder_file(path))
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        elsewhere = holder["host"] != socket.gethostname()
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written the file yet
        who, elsewhere = "another process", False
    # .NAME.lock locks NAME; .lock, without a name, locks its directory.
    what = what or path.parent / path.name[1 : -len(LOCK_FILE)]
    message = (
        f"{what} is in use by {who}. Wait for that process, stop it, or choose another {option}"
    )
    return f"{message}; if it has ended, delete {lock}" if elsewhere else message


def _holder_file(lock: Path) -> Path:
    return lock.with_name(f"{lock.name}.json")
