"""A directory of finished results that later commands reuse: key -> record.

A command is a list of tasks. The result of a task is a *record*: a JSON file, written atomically,
that contains the task's key. The key is a digest of everything that decides the result, so an
interrupted command resumes where it stopped, and a changed input is measured again:

    store = Store(out)
    with store.hold():                            # no second writer
        store.claim(settings, {"text": digest_of_path(text)})   # raises for other settings
        key = task_key(settings, "loss of metis")
        loss = store.get("loss-metis", key)
        if loss is None:
            loss = measure()
            store.put("loss-metis", key, loss)

Several processes, on one or several machines, can work on different tasks of one directory if each
holds its task, `store.hold(name)`, instead of the directory.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from metis_hf.shared.inputs import INPUTS_FILE, digest
from metis_hf.shared.locks import LOCK_FILE, hold
from metis_hf.shared.records import SETTINGS_FILE, environment, flatten, read_json, write_json

FORMAT = 1  # version of the record files
# The part of the package that decides the numbers of a task.
NUMERICS = ("noise.py", "numerics", "transforms", "operands", "schemes", "layers")
_OWN = "store"  # the store's own field in a record file
_WAIT = 60  # seconds to wait while another process claims the directory
_environment = functools.cache(environment)  # the same for all records of a process


class DamagedRecord(ValueError):
    """A record file is damaged or holds another record."""


@dataclass(frozen=True)
class Record:
    """A finished result."""

    key: str  # see `task_key`
    value: dict[str, Any]
    made: dict[str, Any]  # versions, commit and device that made it


class Store:
    """The records of one directory.

    Args:
        directory: created by the first write.
        option: the command's option that chose the directory, for error messages.
        device: the device of the tasks, for provenance; None takes the machine's accelerator.
    """

    def __init__(
        self, directory: str | Path, option: str = "--out", device: torch.device | None = None
    ) -> None:
        self.directory, self.option, self.device = Path(directory), option, device

    def path(self, name: str) -> Path:
        """Return the file of a record: runs/metis/loss.json for "runs/metis/loss".

        Names may come from checkpoints, so characters that are not portable are escaped.
        """
        parts = [quote(part, safe=" ,+=()") for part in name.split("/")]
        parts = [part.replace(".", "%2E") if set(part) <= {"."} else part for part in parts]
        return self.directory.joinpath(*parts[:-1], f"{parts[-1]}.json")

    def find(self, name: str) -> Record | None:
        """Return a record, whatever its key; None if there is none.

        Raises:
            DamagedRecord: the file is truncated, or holds something else.
            ValueError: another version wrote it.
        """
        path = self.path(name)
        if not path.exists():
            return None
        way_out = f"; delete it to compute it again, or choose another {self.option}"
        try:
            content = read_json(path)
        except ValueError as error:
            raise DamagedRecord(f"{error}{way_out}") from None
        own = content.pop(_OWN, None) if isinstance(content, dict) else None
        own = own if isinstance(own, dict) else {}
        written = own.get("format")
        if isinstance(written, int) and written != FORMAT:
            raise ValueError(
                f"{path} has format {written}, written by another version of metis-hf; this "
                f"version reads format {FORMAT}{way_out}"
            )
        if written is None or own.get("name") != name or not isinstance(own.get("key"), str):
            raise DamagedRecord(f"{path} is not the record of {name!r}{way_out}")
        return Record(own["key"], content, own.get("made", {}))

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        """Return the result of a task; None if there is none under this key. Raises as `find`."""
        record = self.find(name)
        return record.value if record is not None and record.key == key else None

    def put(self, name: str, key: str, value: Mapping[str, Any]) -> None:
        """Write the result of a task, replacing an earlier one.

        Raises:
            OSError: the write failed, for example on a full disk; the earlier record stays.
        """
        path = self.path(name)
        own = {"format": FORMAT, "name": name, "key": key, "made": _environment(self.device)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {**value, _OWN: own})
        except OSError as error:
            what = (
                f"{error.strerror}; earlier results are kept, and the same command continues from "
                "them"
            )
            raise OSError(error.errno, what, str(path)) from None

    def claim(self, settings: Mapping[str, Any], inputs: Mapping[str, str] | None = None) -> None:
        """Claim the directory for an experiment; the same experiment may claim it again.

        Args:
            settings: the settings that identify the experiment, JSON-ready.
            inputs: readable name -> digest of the contents of each input.

        Raises:
            ValueError: the directory holds results of other settings or other inputs; the message
                names the differences.
        """
        with hold(self._lock_file("claim"), _WAIT, option=self.option):
            self._claim_settings(json.loads(json.dumps(settings)))
            if inputs:
                self._claim_inputs(inputs)

    def _claim_settings(self, settings: dict[str, Any]) -> None:
        path = self.directory / SETTINGS_FILE
        if path.exists():
            there, now = flatten(read_json(path)), flatten(settings)
            keys = [key for key in now | there if now.get(key) != there.get(key)]
            if keys:
                shown = (f"{key}: {there.get(key)} there, {now.get(key)} now" for key in keys)
                raise ValueError(
                    f"{self.directory} contains a run with other settings ({', '.join(shown)}). "
                    f"Choose another {self.option}, or delete the directory"
                )
        write_json(path, settings)

    def _claim_inputs(self, inputs: Mapping[str, str]) -> None:
        path = self.directory / INPUTS_FILE
        there = read_json(path) if path.is_file() else {}
        changed = [name for name in inputs if there.get(name, inputs[name]) != inputs[name]]
        if changed:
            raise ValueError(
                f"{' and '.join(changed)} changed after {self.directory} was started, and its "
                f"results belong to the earlier contents; choose another {self.option}, or delete "
                "the directory"
            )
        write_json(path, {**there, **inputs})

    def hold(self, name: str = "") -> AbstractContextManager[None]:
        """Lock the directory, or one task, against other writers while the block runs.

        The operating system releases the lock when the process ends. Child processes, forked ones
        included, do not hold the lock.

        Args:
            name: the task to lock; "" locks the directory.

        Raises:
            ValueError: another process holds the lock; the message names that process.
        """
        return hold(self._lock_file(name), option=self.option)

    def _lock_file(self, name: str) -> Path:
        path = self.path(name)
        return path.with_name(f".{path.stem}{LOCK_FILE}") if name else self.directory / LOCK_FILE


def task_key(*parts: Any) -> str:
    """Return the key of a task: a digest of `parts`, JSON-ready, and of the numerics."""
    return digest(numerics_digest(), *parts)


@functools.cache
def numerics_digest() -> str:
    """Return a digest of the NUMERICS source and of the torch and transformers versions."""
    root = Path(__file__).parents[1]
    # The package metadata has transformers' version; importing the library takes seconds.
    versions = torch.__version__, importlib.metadata.version("transformers")
    return digest(source_digest(*(root / name for name in NUMERICS)), versions)


def source_digest(*paths: str | Path) -> str:
    """Return a digest of Python files and folders of them, ignoring comments and docstrings.

    A task with code of its own adds the code to its key: `task_key(source_digest(__file__), ...)`.
    """
    found = []
    for path in map(Path, paths):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(path.parent).as_posix()
            found.append((name, _code(file.read_text("utf-8"))))
    return digest(found)


def _code(source: str) -> str:
    """Return source without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)
