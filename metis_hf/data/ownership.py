"""Whose an output directory of a preparation is: the settings that it was begun with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metis_hf.data.arguments import PrepareArguments
from metis_hf.data.chunked import ARGUMENTS
from metis_hf.data.perplexity import device_type
from metis_hf.data.source import local_files
from metis_hf.shared.inputs import digest, digest_of_path
from metis_hf.shared.locks import LOCK_FILE
from metis_hf.shared.records import read_json


def settings_of(arguments: PrepareArguments) -> dict[str, Any]:
    """Return what decides the output: the arguments, what lies at their paths, the device."""
    settings: dict[str, Any] = {"arguments": arguments.in_result()}
    read = local_files(arguments.files) if arguments.files is not None else []
    models = [arguments.reference_model] if arguments.perplexity_filter else []
    contents = {path: _digest_of_model(path) for path in [arguments.tokenizer, *models]}
    contents |= {path: digest_of_path(Path(path)) for path in read}
    settings["contents"] = {path: digest for path, digest in contents.items() if digest}
    if arguments.perplexity_filter:
        settings["reference_device"] = device_type()
    return settings


def _digest_of_model(name: str) -> str | None:
    """Return a digest of the files of a tokenizer or a model; None for those of the hub."""
    folder = Path(name)
    if not folder.is_dir():
        return None
    kinds = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "*.bin")
    files = sorted(path for kind in kinds for path in folder.glob(kind))
    return digest(*((path.name, digest_of_path(path)) for path in files))


def check_owner(output: Path, settings: dict[str, Any]) -> None:
    """Refuse a directory of another preparation or of something else.

    Args:
        output: the directory.
        settings: of this preparation, as `settings_of` gives them.

    Raises:
        ValueError: it is such a directory; the message names what differs.
    """
    path = output / ARGUMENTS
    if path.exists():
        there = read_json(path)
        if "contents" not in there:  # of an earlier version, which looked at sizes alone
            there = {k: v for k, v in there.items() if k != "file_sizes"}
            there["contents"] = settings["contents"]
        old, new = (each.get("contents", {}) for each in (there, settings))
        changed = [name for name in old if name in new and old[name] != new[name]]
        differences = [
            *_differences(there | {"contents": [*old]}, settings | {"contents": [*new]}),
            *(f"what lies at {name} has changed" for name in changed),
        ]
        if differences:
            raise ValueError(
                f"{output} holds a preparation with other settings: {'; '.join(differences)}. Run "
                "it with those, delete the directory, or choose another output_dir"
            )
        return
    own = {f"{ARGUMENTS}.tmp", LOCK_FILE}
    if output.is_dir() and any(p.name not in own for p in output.iterdir()):
        raise ValueError(
            f"{output} is not empty and holds no preparation; choose a new directory as output_dir"
        )


def _differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), key)
    elif old != new:
        yield f"{name} was {old!r}, now {new!r}"
