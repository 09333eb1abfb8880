"""Open checkpoints: directories, runs, PEFT adapters, and hub models by name."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import peft

from metis_hf.conversion.hub import read_config
from metis_hf.deploy.packed_layouts import RESIDUAL_DIR, SIDE_FILE
from metis_hf.lab.checkpoint import ADAPTER_FILE, CONFIG_FILE, DENSE, WEIGHTS, Checkpoint
from metis_hf.shared.checkpoints import (
    check_sizes,
    file_damage,
    last_checkpoint,
    model_damage,
    refuse_links,
)
from metis_hf.shared.messages import reading
from metis_hf.shared.records import read_json

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")

logger = logging.getLogger(__name__)


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory: itself, its `model/`, or its last `checkpoint-<step>`.

    A PEFT adapter in any of these places is opened as its base model with the adapter on top. An
    incomplete `model/` or `checkpoint-<step>`, left by a run that was interrupted while saving, is
    skipped with a warning.

    Raises:
        FileNotFoundError: no such directory.
        ValueError: no checkpoint, a checkpoint without weights or with truncated files, or an
            export with a side file.
    """
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a directory; name a checkpoint (a directory with config.json) or a "
            "run that contains model/ or checkpoint-<step>"
        )
    with reading(path):
        return _open_checkpoint(path)


def _open_checkpoint(path: Path) -> Checkpoint:
    _refuse_side_file(path)
    place = _place(path)
    if place is None:
        raise ValueError(f"{path} contains no checkpoint (config.json and weights){_hint(path)}")
    refuse_links(place, path)
    if not (place / CONFIG_FILE).is_file():
        return _open_adapter(place)
    config = read_json(place / CONFIG_FILE)
    quantization = (config.get("quantization_config") or {}) if isinstance(config, dict) else None
    if not isinstance(quantization, dict) or not isinstance(
        quantization.get("quant_method", ""), str | None
    ):
        raise ValueError(
            f"{place / CONFIG_FILE} is not a model config; expected a JSON object as "
            "save_pretrained writes it"
        )
    check_sizes(config, place / CONFIG_FILE)
    checkpoint = Checkpoint(place, _label(place, 0), quantization)
    if not checkpoint.weight_files():
        raise ValueError(
            f"{place} has a config.json but no weights (*.safetensors); to save them from a run "
            "on several devices, call trainer.save_model with a full state dict"
        )
    for file in checkpoint.weight_files():
        if (reason := file_damage(file)) is not None:
            raise ValueError(
                f"{place}: {reason}, probably because a process ended while saving; resume from "
                "an older checkpoint, or copy the file again"
            )
    return checkpoint


def _refuse_side_file(path: Path) -> None:
    """Raise ValueError for an export with a side file, or for its packed part alone."""
    whole = path.resolve()
    whole = whole.parent if whole.name == RESIDUAL_DIR else whole
    if (whole / SIDE_FILE).is_file() and not (whole / CONFIG_FILE).is_file():
        raise ValueError(
            f"{path} is part of an export with a side file: {RESIDUAL_DIR}/ is not the whole "
            "model without the factors beside it. Combine them with "
            f"metis_hf.deploy.load_low_rank({str(whole)!r}).save_pretrained(DIRECTORY) and name "
            "that directory, or the checkpoint that was exported"
        )


def _open_adapter(path: Path) -> Checkpoint:
    """Return the adapter's base model, converted as in training, with the adapter on top."""
    kind: Any = peft.PeftConfig.from_pretrained(str(path))
    if kind.task_type not in (None, "CAUSAL_LM") or not kind.base_model_name_or_path:
        raise ValueError(
            f"{path} is a PEFT adapter of "
            f"{kind.base_model_name_or_path or 'a model without name'} for "
            f"{kind.task_type or 'no task'}; the tasks need an adapter of a causal language model"
        )
    try:
        base = open_model(kind.base_model_name_or_path)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"{path} is a PEFT adapter, and its base model was not found: {error}. Correct "
            f"base_model_name_or_path in {path / ADAPTER_FILE}"
        ) from None
    if (reason := _damage(path)) is not None:
        raise ValueError(
            f"{path} is a PEFT adapter with incomplete weights: {reason}; save it again"
        )
    recorded = getattr(kind, "metis_config", None)
    if recorded is not None and base.scheme == DENSE:
        base = replace(base, conversion=read_config(recorded), trained=True)
    return replace(base, label=_label(path, 0), adapter=path)


def _place(path: Path) -> Path | None:
    """Return the directory of a run's checkpoint, or None."""
    saved = [place for place in (path, path / "model") if _holds(place)]
    damage = {place: _damage(place) for place in saved}
    for place, reason in damage.items():
        if reason is None:
            return place
    last = last_checkpoint(path, _damage)
    if last is None:
        return saved[0] if saved else None
    for place, reason in damage.items():
        logger.warning("%s is incomplete (%s); using %s instead", place, reason, last)
    return Path(last)


def _holds(directory: Path) -> bool:
    """Return whether the directory holds a model or a PEFT adapter, complete or not."""
    return any((directory / name).is_file() for name in (CONFIG_FILE, ADAPTER_FILE))


def _damage(directory: Path) -> str | None:
    """Return why a model or an adapter is incomplete; None if it is complete."""
    if not _holds(directory):
        return f"no {CONFIG_FILE}"
    if (directory / CONFIG_FILE).is_file():
        return model_damage(directory)
    file = directory / ADAPTER_WEIGHTS
    return file_damage(file) if file.is_file() else f"no {ADAPTER_WEIGHTS}"


def download(name: str) -> Path:
    """Return the local directory of a hub model; download it if it is not in the cache.

    Raises:
        FileNotFoundError: the hub has no model of that name, or cannot be reached.
    """

    def fetch(*patterns: str) -> Path:
        # Subfolders of a repository hold the same weights in other formats.
        found = huggingface_hub.snapshot_download(
            name, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
        return Path(found)

    try:
        place = fetch(*_HUB_FILES)
        return place if any(place.glob("*.safetensors")) else fetch(*_HUB_FILES, WEIGHTS[1])
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{name} is not a directory, and the hub returned no model of that name ({reason}); "
            "name a checkpoint (a directory with config.json), a run that contains one, or a "
            "model on the hub"
        ) from error


def open_model(name: str | Path) -> Checkpoint:
    """Open a local checkpoint, or a hub model by its name.

    Raises:
        FileNotFoundError, ValueError: as `open_checkpoint` and `download`.
    """
    if Path(name).is_dir() or not _HUB_NAME.fullmatch(str(name)):
        return open_checkpoint(Path(name))
    return replace(open_checkpoint(download(str(name))), label=str(name))


def open_checkpoints(names: Sequence[str | Path]) -> list[Checkpoint]:
    """Open several checkpoints and give them distinct labels.

    Raises:
        FileNotFoundError, ValueError: as `open_model`; or a checkpoint is named twice.
    """
    found = [open_model(name) for name in names]
    places = Counter(checkpoint.place.resolve() for checkpoint in found)
    twice = [str(path) for path, count in places.items() if count > 1]
    if twice:
        raise ValueError(f"checkpoints named twice: {', '.join(twice)}")
    labels, before, more = [one.label for one in found], None, 0
    local = [Path(name).is_dir() for name in names]  # a hub model keeps its name
    while len(set(labels)) < len(labels) and labels != before:
        more, before = more + 1, labels
        labels = [
            _label(one.place, more, places) if here else one.label
            for one, here in zip(found, local)
        ]
    if labels == before:  # a directory at the root has the name of a hub model
        labels = [
            str(one.place.resolve()) if here else one.label for one, here in zip(found, local)
        ]
    return [replace(one, label=label) for one, label in zip(found, labels)]


def _label(path: Path, more: int, beside: Container[Path] = ()) -> str:
    """Return the run's name with `more` parents, without `model` unless its parent is `beside`."""
    parts = list(path.resolve().parts[1:])
    own = 1
    if parts[-1] == "model" and len(parts) > 1 and path.resolve().parent not in beside:
        parts.pop()
    elif re.fullmatch(r"checkpoint-\d+", parts[-1]):
        own = 2
    return "/".join(parts[-(own + more) :])


def _hint(path: Path) -> str:
    below = sorted(str(p) for p in path.iterdir() if _holds(p) or _holds(p / "model"))
    return f"; choose one of the checkpoints below it: {' '.join(below)}" if below else ""
