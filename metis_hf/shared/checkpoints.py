"""Finds complete and damaged checkpoints in a Trainer's output directory.

A process that is killed while saving leaves a directory with missing or truncated files. Only cheap
checks are done, of names, sizes, headers and JSON; no tensor is read.
"""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError, safe_open

from metis_hf.shared.messages import some
from metis_hf.shared.records import read_json

STATE_FILE = "trainer_state.json"  # written last, after all other files of a checkpoint
_PREFIX = "checkpoint-"
_ARGUMENTS = "training_args.bin"
# In the name of a file (optimizer.pt, optimizer.bin under FSDP) or a directory of shards.
_OPTIMIZER = "optimizer"
_DEEPSPEED = "global_step"  # prefix of a directory's name
_TORCH_FILES = (".pt", ".pth", ".bin")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
# Suffixes of files that are read; other files, such as logs, may be links.
_READ = (
    ".json",
    ".safetensors",
    ".bin",
    ".model",
    ".txt",
    ".jinja",
    ".spm",
    ".codes",
    "additional_chat_templates",
)
_LAYERS = 1000  # a config with up to this many layers is not checked against the weights
_ZIP = b"PK"  # first bytes of torch.save's files

logger = logging.getLogger(__name__)


def last_checkpoint(
    output_dir: str | Path, damage: Callable[[Path], str | None] | None = None
) -> str | None:
    """Return the newest complete checkpoint in a Trainer's output directory, or None.

    `resume_from_checkpoint=True` takes the newest directory and fails if it is incomplete;
    `trainer.train(resume_from_checkpoint=last_checkpoint(output_dir))` falls back to the previous
    checkpoint. A warning names each newer directory that is skipped, with the reason.

    Args:
        output_dir: directory that holds `checkpoint-<step>`.
        damage: returns why a checkpoint is unusable, or None; default: `checkpoint_damage`, which
            checks everything that training resumes from.
    """
    passed = []
    chosen = None
    for path in newest_first(Path(output_dir)):
        reason = (damage or checkpoint_damage)(path)
        if reason is None:
            chosen = path
            break
        passed.append(f"{path} is incomplete ({reason})")
    if passed:
        instead = "there is no older one" if chosen is None else f"{chosen.name} is used instead"
        logger.warning("%s; %s", "; ".join(passed), instead)
    return None if chosen is None else str(chosen)


def newest_first(output_dir: Path) -> list[Path]:
    """Return the directories `checkpoint-<step>`, the largest step first."""
    found = []
    for path in output_dir.glob(f"{_PREFIX}*"):
        step = path.name.removeprefix(_PREFIX)
        if step.isdecimal() and path.is_dir():
            found.append((int(step), path))
    return [path for _, path in sorted(found, reverse=True)]


def checkpoint_damage(directory: Path) -> str | None:
    """Describe the damage of a Trainer checkpoint; None if it is complete."""
    entries = sorted(directory.iterdir())
    reason = state_damage(directory) or model_damage(directory) or _file_damage(entries)
    if reason is not None:
        return reason
    if any(path.name.startswith(_DEEPSPEED) for path in entries):  # has the optimizer and scheduler
        return None
    optimizer = any(_OPTIMIZER in path.name for path in entries)
    scheduler = (directory / "scheduler.pt").is_file()
    if optimizer == scheduler:  # both, or neither (save_only_model)
        return None
    return "no scheduler.pt" if optimizer else "no optimizer.pt"


def state_damage(directory: Path) -> str | None:
    """Return why Trainer's state cannot be read from a checkpoint; None if it can."""
    path = directory / STATE_FILE
    return file_damage(path) if path.is_file() else f"no {STATE_FILE}"


def model_damage(directory: Path) -> str | None:
    """Describe missing or truncated files in a saved model's directory; None if it is complete."""
    weights = [path for path in sorted(directory.iterdir()) if _may_hold_weights(path)]
    if not weights:
        return "no weights"
    configs = [*directory.glob("config.json"), *_indices(directory)]
    damage = _file_damage([*weights, *configs])
    return damage or _missing_shard(directory) or depth_damage(directory)


# Sizes in config.json; none may be negative, and the first group may not be 0.
_NEVER_ZERO = ("vocab_size", "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head",
               "num_heads")  # fmt: skip
_SIZES = (*_NEVER_ZERO, "intermediate_size", "n_inner", "d_ff", "num_hidden_layers", "n_layer",
          "num_layers", "num_key_value_heads", "head_dim", "d_kv", "max_position_embeddings",
          "n_positions")  # fmt: skip


def check_sizes(config: Mapping[str, Any], where: str | Path) -> None:
    """Refuse impossible sizes in the contents of a model's config.json, whose path is `where`.

    Raises:
        ValueError: a size is negative, or 0 although it must be positive.
    """
    parts = (config, *(config.get(key) for key in ("text_config", "decoder", "encoder")))
    for part in parts:
        if not isinstance(part, Mapping):
            continue
        for name in _SIZES:
            size = part.get(name)
            if isinstance(size, int | float) and (size < 0 or (not size and name in _NEVER_ZERO)):
                raise ValueError(f"{where} has {name}={size}, an impossible size; correct it")


def load_complete(cls: Any, path: str | Path, **options: Any) -> Any:
    """Load a model, and refuse missing parameters, which transformers would initialize randomly.

    `cls` is one of transformers' model or auto classes, and `path` a directory or a hub name.

    Raises:
        ValueError: files are missing or truncated, or parameters of the class are missing.
    """
    directory = Path(path, options.get("subfolder") or "")
    if directory.is_dir() and (reason := model_damage(directory)) is not None:
        raise ValueError(f"{directory} is incomplete: {reason}; copy its files again")
    with_info = options.pop("output_loading_info", False)
    model, found = cls.from_pretrained(path, output_loading_info=True, **options)
    made_up = [name for name, _ in model.named_parameters() if name in found["missing_keys"]]
    if made_up:
        saved = (getattr(model.config, "architectures", None) or ["another class"])[0]
        raise ValueError(
            f"{path} lacks {some(made_up)}, which {type(model).__name__} needs and which would be "
            f"random; it was saved from {saved}. Copy its files again, or choose a checkpoint of "
            "the whole model, with its head"
        )
    return (model, found) if with_info else model


def refuse_links(directory: str | Path, below: str | Path | None = None) -> None:
    """Refuse files of a model that are links to outside its directory.

    The directory may be untrusted; the target of a link would be read and copied to derived models.
    Links to the hub cache are allowed: cached models consist of them. So are links inside `below`,
    a parent of the directory (None: the directory itself).

    Raises:
        ValueError: there is such a link; the message names it.
    """
    directory = Path(directory)
    paths = [directory, *directory.glob("additional_chat_templates/*")]
    paths += [path for path in directory.iterdir() if path.name.endswith(_READ)]
    for path in paths:
        refuse_link(path, Path(below or directory))


def refuse_link(path: Path, directory: Path) -> None:
    """Refuse a path that links to outside a directory; see `refuse_links`.

    Raises:
        ValueError: the path is such a link.
    """
    root, target = directory.resolve(), path.resolve()
    inside = [root, Path(HF_HUB_CACHE).resolve()]
    if root.parent.name == "snapshots":
        inside.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in inside):
        raise ValueError(
            f"{path} is a link to {target}, outside of {root}, and is not followed, because the "
            "directory may be untrusted. Replace the link with the file itself"
        )


def _file_damage(paths: Iterable[Path]) -> str | None:
    """Return the first damage of some files, or None."""
    reasons = (file_damage(path) for path in paths if path.is_file())
    return next(filter(None, reasons), None)


def _missing_shard(directory: Path) -> str | None:
    """Return the missing shard or index of a sharded model, as a message; None if complete."""
    names = {path.name for path in directory.iterdir()}
    indices = _indices(directory)
    kind = _weights_kind(directory)
    if not indices and any(_SHARD.search(name) and name.endswith(kind) for name in names):
        return "no index of its weights"
    wanted: set[str] = set()
    for path in indices:
        index = read_json(path)
        shards = index.get("weight_map", {}) if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(x, str) for x in shards.values()):
            return f"{path.name} is not an index of weights"
        wanted |= set(shards.values())
    missing = sorted(wanted - names)
    return f"no {missing[0]}" if missing else None


def depth_damage(directory: Path) -> str | None:
    """Return why the config has more layers than the weights support, or None; see `_LAYERS`."""
    file = directory / "config.json"
    config = read_json(file) if file.is_file() else {}
    parts = [config, *config.values()] if isinstance(config, dict) else []
    counts = [
        value
        for part in parts
        if isinstance(part, dict)
        for key, value in part.items()
        if key.endswith(("layers", "_layer")) and isinstance(value, int)
    ]
    most = max(counts, default=0)
    if most <= _LAYERS:
        return None
    stored = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            stored += len(tensors.keys())
    if most <= stored:
        return None
    return f"{file.name} has {most:,} layers, but the weights have only {stored:,} tensors"


def _indices(directory: Path) -> list[Path]:
    """Return the index files of the weights that transformers would load."""
    return sorted(directory.glob(f"*{_weights_kind(directory)}.index.json"))


def _weights_kind(directory: Path) -> str:
    """Return the suffix of the weights that transformers loads: .safetensors if there are any."""
    found = any(directory.glob("*.safetensors")) or any(directory.glob("*.safetensors.index.json"))
    return ".safetensors" if found else ".bin"


def file_damage(path: Path) -> str | None:
    """Return why a checkpoint file cannot be read; None if it can, or for other file types."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):  # checks the header against the file size
                return None
        if path.suffix == ".json":
            read_json(path)
        if path.suffix in _TORCH_FILES:
            return _torch_file_damage(path)
    except (SafetensorError, ValueError):
        return f"{path.name} is truncated"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None


def _torch_file_damage(path: Path) -> str | None:
    with open(path, "rb") as file:
        start = file.read(len(_ZIP))
    # A zip file ends with its directory. The legacy format does not record its length.
    whole = zipfile.is_zipfile(path) if start == _ZIP else len(start) == len(_ZIP)
    return None if whole else f"{path.name} is truncated"


def _may_hold_weights(path: Path) -> bool:
    """Return whether a file or directory in a checkpoint may hold weights."""
    if _OPTIMIZER in path.name:
        return False
    if path.is_dir():
        return True
    return path.suffix == ".safetensors" or (path.suffix == ".bin" and path.name != _ARGUMENTS)
