"""The user's options of a comparison: the keys of the YAML file, read and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, TrainingArguments

from metis_hf.lab.compare.presets import PRESETS
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.compare.variants import LARGEST_SEED
from metis_hf.shared.messages import shown
from metis_hf.shared.yaml_file import read_yaml

DEFAULT_SEEDS = (0, 1, 2)
_TEXTS = {"preset", "reference", "size", "checkpoint", "data", "validation", "tasks_dir"}
# TrainingArguments that a comparison sets for every run -> what sets them.
OWN_ARGUMENTS = {
    "output_dir": "every run has a directory below --out",
    "run_name": "each run is named after its variant and seed",
    "seed": "set the seeds with the key seeds, or --seeds",
    "data_seed": "the order of the data follows from seeds",
    "gradient_accumulation_steps": "it follows from global_batch",
    "train_sampling_strategy": "the order of the data follows from seeds",
    "num_train_epochs": "set tokens, or training: {max_steps: N}",
    "logging_strategy": "curves and times come from logged steps; set logging_steps instead",
    "resume_from_checkpoint": "the same command resumes its runs automatically",
    "eval_strategy": "the held-out loss is measured when a run ends",
    "eval_on_start": "the held-out loss is measured when a run ends",
}
_FROM_ZERO = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon")
_BELOW_ONE = ("adam_beta1", "adam_beta2")


@dataclass(kw_only=True)
class Options:
    """Input of `make_plan` from a YAML file or a command line, checked on construction.

    Raises:
        ValueError: a value that is out of range or of the wrong type; the message names its key.
    """

    preset: str | None = None
    schemes: Sequence[str] | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reference: str | None = None
    seeds: Sequence[int] = DEFAULT_SEEDS
    size: str | None = None
    checkpoint: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    tokens: float | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    health_interval: int | None = None
    eval_sequences: int | None = None
    data: str | None = None
    validation: str | None = None
    tasks: Sequence[str] = ()
    tasks_dir: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("preset", PRESETS), ("size", SIZES)):
            value = getattr(self, name)
            if value is not None and value not in known:
                choices = ", ".join(known)
                raise ValueError(f"{name} {shown(value)} is not known; choose from {choices}")
        if self.checkpoint is not None and (self.size is not None or self.model):
            raise ValueError(
                f"checkpoint={self.checkpoint} already defines the model; leave size and model "
                "out, and change the training with training, tokens, sequence_length and "
                "global_batch"
            )
        if self.schemes is not None:
            _texts("schemes", self.schemes, "[bf16, metis]")
            if not self.schemes:
                raise ValueError("schemes: the list is empty; name some, or leave schemes out")
        _texts("tasks", self.tasks, "[a]")
        _list("seeds", self.seeds, "[0, 1]")
        for name in ("variants", "model", "training"):
            _mapping(name, getattr(self, name))
        for key in self.model:
            _text("a key of model", key)
        for name, fields in self.variants.items():
            _mapping(f"variants: {name}", fields)
            if "scheme" in fields:
                _text(f"variants: {name}: scheme", fields["scheme"])
            if fields.get("precision_schedule") is not None:
                _mapping(f"variants: {name}: precision_schedule", fields["precision_schedule"])
            if "seed" in fields:
                raise ValueError(
                    f"variant {name!r} sets seed, which every run takes from the key seeds; "
                    "leave it out"
                )
        for name in ("sequence_length", "global_batch", "eval_sequences"):
            _at_least(1, name, getattr(self, name))
        _at_least(0, "health_interval", self.health_interval)
        self.tokens = None if self.tokens is None else _positive("tokens", self.tokens)
        for seed in self.seeds:
            _at_least(0, "seeds", seed, LARGEST_SEED)
        self.training = _training(self.training)


def given_values(file: Path | None, **options: Any) -> dict[str, Any]:
    """Return the values of a YAML file and options; options override the file, None is not given.

    Raises:
        ValueError: the file is not YAML, or has a key that `Options` does not have; a list or a
            number in place of a name or a path.
    """
    keys = [field.name for field in dataclasses.fields(Options)]
    found = {} if file is None else read_yaml(file)
    for key in found:
        if key not in keys:
            hint = _near(key, keys) or f"; keys: {', '.join(keys)}"
            raise ValueError(f"{file}: there is no key {shown(key)}{hint}")
    found |= {key: value for key, value in options.items() if value is not None}
    values = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in found.items()
        if value is not None
    }
    for name in _TEXTS & values.keys():
        _text(name, values[name])
    return values


def check_model(given: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Reject keys of `model` that its config does not have; transformers accepts them silently.

    Args:
        given: the keys that the user set.
        model: all keys, including `model_type`.

    Raises:
        ValueError: such a key, an unknown `model_type`, or values that make no model.
    """
    try:
        made = vars(AutoConfig.for_model(**model))
        plain = AutoConfig.for_model(model["model_type"])
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"model: {' '.join(str(error).split())}") from None
    for key in given:
        if key in made and key not in vars(plain):
            near = _near(key, [*vars(plain), *plain.attribute_map])
            raise ValueError(f"model: a config of {plain.model_type} has no {key!r}{near}")


def _training(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check TrainingArguments, and parse numbers that YAML 1.1 reads as text, such as 1e-3."""
    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    hints = typing.get_type_hints(TrainingArguments)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            hint = _near(key, known)
            raise ValueError(f"training: transformers' TrainingArguments has no {key!r}{hint}")
        if key in OWN_ARGUMENTS:
            raise ValueError(f"training: {key} cannot be set in a comparison: {OWN_ARGUMENTS[key]}")
        values[key] = value
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # not a number
                values[key] = float(value)
        _check_number(key, values[key], set(typing.get_args(hints[key])) or {hints[key]})
    for key in ("max_steps", "per_device_train_batch_size", "per_device_eval_batch_size"):
        _at_least(1, f"training: {key}", values.get(key))
    return values


def _check_number(key: str, value: Any, kinds: set[Any]) -> None:
    """Reject values that are not numbers in range, which TrainingArguments does not check."""
    if value is None and type(None) in kinds:
        return
    if kinds <= {int, type(None)} and type(value) is not int:
        raise ValueError(f"training: {key}: {shown(value)}; expected a whole number")
    if kinds <= {float, type(None)}:
        limit = " from 0 up" * (key in _FROM_ZERO) + " and below 1" * (key in _BELOW_ONE)
        least = 0.0 if key in _FROM_ZERO else -math.inf
        most = 1.0 if key in _BELOW_ONE else math.inf
        number = type(value) in (int, float) and not math.isnan(value)
        if not number or not least <= value <= most or value == 1 == most:
            raise ValueError(f"training: {key}: {shown(value)}; expected a number{limit}")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str | Path):
        raise ValueError(f"{name}: {shown(value)}; expected a string")


def _list(name: str, value: Any, example: str) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name}: {shown(value)} is not a list; write {name}: {example}")


def _texts(name: str, value: Any, example: str) -> None:
    _list(name, value, example)
    for each in value:
        _text(name, each)


def _mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {shown(value)} is not a mapping of names to values")


def _at_least(least: int, name: str, value: Any, most: int | None = None) -> None:
    if value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: {shown(value)}; expected a whole number, {limit}")


def _positive(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{name}: {shown(value)}; expected a positive number")
    return number


def _near(key: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
