"""Reading a YAML file of options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metis_hf.shared.texts import utf8_text


def read_yaml(path: Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file; an empty file has none.

    Raises:
        ValueError: there is no such file, or it is not YAML or not a mapping; the message names it.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        values = yaml.safe_load(utf8_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{path} is not a mapping of names to values, as in `seeds: [0, 1]`")
    return values or {}


def as_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return names and values, as of a YAML file, as arguments of a command line.

    A mapping becomes JSON, and a list several arguments. So a parser converts and checks a value
    wherever it comes from: YAML 1.1 reads 1e-4 as a string.

    Raises:
        ValueError: a name without a value.
    """
    arguments = []
    for name, value in values.items():
        if value is None:
            raise ValueError(f"{name} has no value; give it one, or leave the line out")
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments.append(f"--{name}={text}")
    return arguments
