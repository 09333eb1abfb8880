"""Measurements on disk while a command runs: what is there already is not measured again.

`measured.jsonl` has a line for each measurement, written when it is made. A measurement is found
again under its name and a digest of all that it depends on: the weights' files, the text, the
settings, the code. A line that a killed process left half-written is not there.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from metis_hf.shared.inputs import digest

FILE = "measured.jsonl"
FIGURE = "figure"  # of lines that say from which data a picture was drawn

_Key = tuple[str, str, str]  # part, name, kind


@functools.cache
def code_digest() -> str:
    """Return a digest of all that figures depend on: this package's code, torch, transformers."""
    root = Path(__file__).parents[1]
    paths = sorted(root.rglob("*.py"))
    files = [(str(path.relative_to(root)), path.read_text("utf-8")) for path in paths]
    # The version as it is installed: the library itself takes seconds to import.
    return digest(files, torch.__version__, importlib.metadata.version("transformers"))


class Store:
    """The measurements of one output directory.

    Args:
        folder: the directory; it is made if it is not there.
        current: digests of what may be measured now; measurements of anything else are not given.
        keep_others: keep those in the file, for a command with other settings; else they go.
    """

    def __init__(
        self, folder: Path, current: Collection[str], *, keep_others: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._found: dict[_Key, tuple[str, Any]] = {}
        data = self.path.read_bytes() if self.path.exists() else b""
        # What was measured twice counts as it was measured last.
        kept: dict[tuple[_Key, str], bytes] = {}
        for line in data.splitlines(keepends=True):
            try:
                part, name, kind, depends, value = json.loads(line)
            except (ValueError, TypeError):
                continue
            if line.endswith(b"\n"):
                key = part, name, kind
                if depends in current or part == FIGURE:
                    self._found[key] = depends, value
                    kept[key, ""] = line
                elif keep_others:
                    kept[key, depends] = line
        if b"".join(kept.values()) != data:
            temporary = self.path.with_name(f"{FILE}.tmp")
            temporary.write_bytes(b"".join(kept.values()))
            temporary.replace(self.path)

    def get(self, part: str, name: str, kind: str, depends: str) -> Any:
        """Return a measurement, or None where there is none of these circumstances."""
        found, value = self._found.get((part, name, kind), ("", None))
        return value if found == depends else None

    def put(self, part: str, name: str, kind: str, depends: str, value: Any) -> None:
        """Keep a measurement, in memory and on disk."""
        self._found[part, name, kind] = depends, value
        with self.path.open("a") as file:
            file.write(json.dumps((part, name, kind, depends, value)) + "\n")
