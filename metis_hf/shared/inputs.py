"""Digests of the values and files that an experiment reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

INPUTS_FILE = "inputs.json"
_SAMPLES, _BLOCK = 16, 1 << 16  # blocks read per file, bytes per block


def digest(*parts: Any) -> str:
    """Return a short digest of JSON-ready values."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_path(path: Path) -> str:
    """Return a digest of a file, or of all files under a directory: names, sizes, byte samples.

    At most 16 evenly spaced blocks of 64 KiB are read per file, so that models and corpora of many
    gigabytes are fast. Hidden files and the caches of datasets and Python are left out.
    """
    root = path if path.is_dir() else path.parent
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(root)
        # Importing a module in the folder creates __pycache__.
        hidden = any(part.startswith((".", "cache-", "__pycache__")) for part in name.parts)
        if file.is_file() and not hidden:
            size = file.stat().st_size
            digest.update(f"{name.as_posix()} {size}\n".encode())
            with open(file, "rb") as stream:
                last = max(0, size - _BLOCK)
                count = min(_SAMPLES, -(-size // _BLOCK))
                for number in range(count):
                    stream.seek(last * number // max(1, count - 1))
                    digest.update(stream.read(_BLOCK))
    return digest.hexdigest()
