"""Reads a YAML file of options.

The file may be untrusted, so its size and its number of values after expanding aliases are bounded:
half a kilobyte of nested aliases can expand to billions of values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metis_hf.shared.texts import bounded, utf8_text

LARGEST = 1 << 18  # bytes of a file; YAML parses this many in about a second
_VALUES = 10_000  # most values after expansion, or the text's length if larger


def read_yaml(path: Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file; an empty file has none.

    Raises:
        ValueError: the file does not exist, is not YAML or not a mapping, is too large, or is
            nested too deeply, aliases expanded; the message names it.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    text = utf8_text(bounded(path, LARGEST))
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if _count(node, {}) > max(_VALUES, len(text)):
            raise ValueError(
                f"{path}: its aliases (*name) expand to more than {_VALUES:,} values; write the "
                "values out"
            )
        values = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply, or an alias contains itself") from None
    finally:
        loader.dispose()
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{path} is not a mapping of names to values, such as `seeds: [0, 1]`")
    return values or {}


def _count(node: Any, known: dict[int, int]) -> int:
    """Return the number of nodes in a YAML node, with aliases expanded."""
    if id(node) not in known:
        parts = node.value if node is not None and isinstance(node.value, list) else []
        parts = [each for part in parts for each in (part if isinstance(part, tuple) else [part])]
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]


def as_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return names and values, such as from a YAML file, as command-line arguments.

    A mapping becomes JSON; a list becomes several arguments. The parser then converts and checks
    the values, which YAML does not do consistently: YAML 1.1 reads 1e-4 as a string.

    Raises:
        ValueError: a name without a value.
    """
    arguments = []
    for name, value in values.items():
        if value is None:
            raise ValueError(f"{name} has no value; set one, or remove the line")
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments.append(f"--{name}={text}")
    return arguments
