"""Reading a YAML file of options.

The file may be a stranger's. Its text and what its aliases stand for are bounded: half a kilobyte
of nested aliases stands for billions of values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metis_hf.shared.texts import bounded, utf8_text

LARGEST = 1 << 18  # bytes of a file of options: YAML takes about a second for them
_VALUES = 10_000  # that aliases may stand for, or as many as the text has characters


def read_yaml(path: Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file; an empty file has none.

    Raises:
        ValueError: there is no such file, or it is not YAML or not a mapping, or is too large or
            too deep, by its aliases too; the message names it.
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
                f"{path}: its aliases (*name) stand for more than {_VALUES:,} values; write out "
                "what you mean"
            )
        values = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply, or an alias contains itself") from None
    finally:
        loader.dispose()
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{path} is not a mapping of names to values, as in `seeds: [0, 1]`")
    return values or {}


def _count(node: Any, known: dict[int, int]) -> int:
    """Return the number of nodes that a node of YAML stands for, aliases written out."""
    if id(node) not in known:
        parts = node.value if node is not None and isinstance(node.value, list) else []
        parts = [each for part in parts for each in (part if isinstance(part, tuple) else [part])]
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]


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
