"""Writes a directory so that nobody finds half of it, nor parts of two.

What is written lies in a hidden directory until it is whole: beside the one that it becomes, or in
it where that is there already, which may be a volume. The hidden directory has a lock, which the
operating system ends with the writer. So a second writer is refused, and what a killed one left is
told from work in progress: the next writer removes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from metis_hf.shared.locks import LOCK_FILE, hold
from metis_hf.shared.records import give_usual_modes, read_json, write_json

_CONTENT, _MOVED = "content", "moved.json"  # in the hidden directory
_LAST = "config.json"  # without it nothing loads a model, so that it moves last


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Give an empty directory to write to; after the block `out` has what was written there.

    Args:
        out: absolute; is missing or empty. If the block fails it stays so.

    Raises:
        ValueError: it is not empty, or another process writes it, which the message names.
    """
    beside, inside = _stage(out.parent, out), _stage(out, out)
    check_free(out)
    exists = out.exists()
    stage, other = (inside, beside) if exists else (beside, inside)
    with _held(out, stage):
        if other.is_dir():
            with _held(out, other):
                pass  # what a dead writer left
        check_free(out)  # another writer may have ended since
        content = stage / _CONTENT
        content.mkdir()
        yield content
        give_usual_modes(content)
        if exists:
            _move(content, out)
        else:
            _become(content, out)


def check_free(out: Path) -> None:
    """Refuse a directory that holds more than what a killed writer left.

    Raises:
        ValueError: as it says.
    """
    if not out.exists():
        return
    if not out.is_dir() or _others(out):
        raise ValueError(f"{out} exists already; give a new directory, or remove it first")


def _stage(place: Path, out: Path) -> Path:
    return place / f".{out.name}.partial-export"


def _others(out: Path) -> list[Path]:
    """Return the entries of a directory but those that a killed writer left or moved there."""
    stage = _stage(out, out)
    left = {stage.name} if _is_stage(stage) else set()
    return [path for path in out.iterdir() if path.name not in left and not _was_moved(path, stage)]


def _is_stage(stage: Path) -> bool:
    """Return whether a directory of that name is a writer's: it has a lock, or nothing yet."""
    if stage.is_symlink() or not stage.is_dir():
        return False
    return (stage / LOCK_FILE).is_file() or not any(stage.iterdir())


def _was_moved(path: Path, stage: Path) -> bool:
    """Return whether a killed writer moved this very file or directory to its place."""
    if not _is_stage(stage) or not (stage / _MOVED).is_file():
        return False
    try:
        moved: Any = read_json(stage / _MOVED)
    except ValueError:
        return False
    return isinstance(moved, dict) and moved.get(path.name) == path.lstat().st_ino


@contextmanager
def _held(out: Path, stage: Path) -> Iterator[None]:
    """Hold a hidden directory, empty but for its lock, and remove it after the block."""
    if stage.is_symlink() or (stage.exists() and not _is_stage(stage)):
        raise ValueError(f"{stage} is in the way, and no export made it; remove or rename it")
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
                _clear(stage)  # first: without its lock, the directory is the next writer's
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
        check_free(out)  # somebody made it since, and put something into it
        raise


def _move(content: Path, out: Path) -> None:
    paths = sorted(content.iterdir(), key=lambda path: (path.name == _LAST, path.name))
    write_json(content.with_name(_MOVED), {path.name: path.lstat().st_ino for path in paths})
    for path in paths:
        path.rename(out / path.name)
