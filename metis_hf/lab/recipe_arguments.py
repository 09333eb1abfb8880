"""The arguments of recipes: command line over YAML file over a recipe's own defaults."""

from __future__ import annotations

import dataclasses
import difflib
import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, PreTrainedConfig, TrainingArguments
from transformers.hf_argparser import string_to_bool

from metis_hf.schemes import import_schemes
from metis_hf.shared.yaml_file import read_yaml


def check_context(config: PreTrainedConfig, sequence_length: int) -> None:
    """Refuse sequences longer than what the model has positions for.

    Raises:
        ValueError: they are.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and sequence_length > context:
        raise ValueError(
            f"--sequence_length {sequence_length} does not fit the model's context of {context} "
            "tokens; choose shorter sequences"
        )


def parse_arguments(
    defaults: Mapping[str, Any],
    smoke: Mapping[str, Any],
    *,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    kind: type[Any],
) -> tuple[Any, TrainingArguments]:
    """Read the command line over `--config FILE.yaml` over the recipe's own defaults.

    Args:
        defaults: of the recipe, for fields of both dataclasses.
        smoke: what `--smoke` changes in them; a YAML file or the command line can change it again.
        description: for `--help`.
        argv: default: that of the process.
        kind: dataclass of the recipe's arguments besides TrainingArguments; `smoke` and `dry_run`
            are among them, and `GOING_ON` says how a run that was stopped goes on.

    Returns:
        (arguments of that kind, TrainingArguments).

    Raises:
        ValueError: a key of the YAML file that no argument has or without a value, epochs, or a
            source of schemes that cannot be imported; or as `kind` raises.
    """
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    early.add_argument("--smoke", nargs="?", const="true", default=None)
    early.add_argument("--dry_run", "--dry-run", nargs="?", const="true", default=None)
    chosen, rest = early.parse_known_args(argv)
    values = dict(defaults)
    types = (kind, TrainingArguments)
    in_file = _read_yaml(chosen.config, types) if chosen.config else {}
    switches = {key: getattr(chosen, key) or in_file.get(key) for key in ("smoke", "dry_run")}
    on = {key for key, value in switches.items() if _is_on(value)}
    if "smoke" in on:
        values |= smoke
    if on:
        values["use_cpu"] = True  # neither wants a device
    values |= in_file
    values |= {key: value for key, value in switches.items() if value is not None}

    parser = HfArgumentParser(types, description=description, allow_abbrev=False)  # type: ignore[arg-type]
    parser.add_argument("--config", help="YAML file of these arguments; the command line wins.")
    # As text, so that argparse converts and checks a value wherever it comes from (in YAML 1.1,
    # 1e-4 is a string).
    parser.set_defaults(**{key: _as_text(value) for key, value in values.items()})
    arguments, training, _ = parser.parse_args_into_dataclasses(args=rest)
    instead_of = {  # arguments of TrainingArguments that recipes do not take
        "num_train_epochs": "--tokens says how long a run is",
        "resume_from_checkpoint": kind.GOING_ON,
    }
    for name, instead in instead_of.items():
        if (value := getattr(training, name)) != getattr(TrainingArguments, name):
            raise ValueError(f"{name}={value}: {instead}; leave it out")
    for source in getattr(arguments, "metis_import", None) or ():
        import_schemes(source)
    return arguments, training


def _read_yaml(path: str, types: Sequence[type]) -> dict[str, Any]:
    values = read_yaml(Path(path))
    known = {f.name: f.default for kind in types for f in dataclasses.fields(kind)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; --help lists the arguments"
            raise ValueError(f"{path}: there is no argument {key!r}{hint}")
        if values[key] is None and known[key] is not None:
            raise ValueError(f"{path}: {key} has no value; give it one, or leave the line out")
    if isinstance(values.get("metis"), dict):
        values["metis"] = json.dumps(values["metis"])
    if isinstance(values.get("metis_import"), str):
        values["metis_import"] = [values["metis_import"]]
    return values


def _is_on(value: Any) -> bool:
    try:
        return value is not None and string_to_bool(str(value))
    except ArgumentTypeError:  # the parser says what it takes
        return False


def _as_text(value: Any) -> Any:
    return value if value is None or isinstance(value, dict | list) else str(value)
