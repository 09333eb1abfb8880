"""Writes a directory through a staging directory, so that readers never see a partial one.

Files are written to a hidden staging directory and moved once all are complete. The staging
directory is a sibling of the output directory, or inside it if the output directory already exists
(it may be a volume). The operating system releases the staging directory's lock when the writer
dies. A second writer is therefore refused, and the next writer can tell a killed writer's leftovers
from work in progress and remove them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from metis_hf.shared.locks import LOCK_FILE, hold
from metis_hf.shared.records import give_usual_modes, read_json, write_json

_CONTENT, _MOVED = "content", "moved.json"  # in the staging directory
_LAST = "config.json"  # moved last, because no model loads without it


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield an empty directory to write to; after the block its contents are in `out`.

    Args:
        out: absolute; missing or empty. It stays so if the block fails.

    Raises:
        ValueError: `out` is not empty, or another process is writing it (the message names that
            process).
    """
    beside, inside = _stage(out.parent, out), _stage(out, out)
    check_free(out)
    exists = out.exists()
    stage, other = (inside, beside) if exists else (beside, inside)
    with _held(out, stage):
        if other.is_dir():
            with _held(out, other):
                pass  # removes a dead writer's leftovers
        check_free(out)  # another writer may have finished meanwhile
        content = stage / _CONTENT
        content.mkdir()
        yield content
        give_usual_modes(content)
        if exists:
            _move(content, out)
        else:
            _become(content, out)


def check_free(out: Path) -> None:
    """Refuse an existing directory with any contents other than a killed writer's leftovers.

    Raises:
        ValueError: `out` has other contents, or is a file.
    """
    if not out.exists():
        return
    if not out.is_dir() or _others(out):
        raise ValueError(f"{out} exists already; give a new directory, or remove it first")


def _stage(place: Path, out: Path) -> Path:
    return place / f".{out.name}.partial-export"


def _others(out: Path) -> list[Path]:
    """Return the entries of a directory except those a killed writer left or moved there."""
    stage = _stage(out, out)
    left = {stage.name} if _is_stage(stage) else set()
    return [path for path in out.iterdir() if path.name not in left and not _was_moved(path, stage)]


def _is_stage(stage: Path) -> bool:
    """Return whether a writer made the directory: it has a lock file, or is still empty."""
    if stage.is_symlink() or not stage.is_dir():
        return False
    return (stage / LOCK_FILE).is_file() or not any(stage.iterdir())


def _was_moved(path: Path, stage: Path) -> bool:
    """Return whether a killed writer moved this file or directory (same inode) to `path`."""
    if not _is_stage(stage) or not (stage / _MOVED).is_file():
        return False
    try:
        moved: Any = read_json(stage / _MOVED)
    except ValueError:
        return False
    return isinstance(moved, dict) and moved.get(path.name) == path.lstat().st_ino


@contextmanager
def _held(out: Path, stage: Path) -> Iterator[None]:
    """Lock and empty a staging directory for the block, then remove it."""
    if stage.is_symlink() or (stage.exists() and not _is_stage(stage)):
        raise ValueError(
            f"{stage} is in the way and was not created by an export; remove or rename it"
        )
    with hold(stage / LOCK_FILE, what=out):
        try:
            if stage.parent == out:
                for path in out.iterdir():
                    if _was_moved(path, stage):
                        _remove(path)
            _clear(stage)
            yield
        finally:
            with suppress(OSError):
                _clear(stage)  # before the lock goes and the next writer may use it
                shutil.rmtree(stage)


def _clear(stage: Path) -> None:
    for path in stage.iterdir():
        if not path.name.startswith(LOCK_FILE):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _become(content: Path, out: Path) -> None:
    try:
        content.rename(out)  # all at once
    except OSError:
        check_free(out)  # raises if another process has created and filled it
        raise


def _move(content: Path, out: Path) -> None:
    paths = sorted(content.iterdir(), key=lambda path: (path.name == _LAST, path.name))
    write_json(content.with_name(_MOVED), {path.name: path.lstat().st_ino for path in paths})
    for path in paths:
        path.rename(out / path.name)
