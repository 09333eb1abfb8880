"""Name matching by the rules of PEFT's `check_target_module_exists`, in linear time.

PEFT matches with `re`, which takes exponential time on some patterns. A config may come from an
untrusted checkpoint, so RE2 matches here. The tests compare these rules with PEFT's.
"""

from __future__ import annotations

import re

from metis_hf.config import MetisConfig
from metis_hf.shared.patterns import containing_pattern, name_pattern

ALL_LINEAR = "all-linear"
EXCLUDED = ("in modules_to_not_convert", "excluded by exclude_modules")


class NameRules:
    """Decides by name whether `target_modules`, `exclude_modules` etc. select a module."""

    def __init__(self, config: MetisConfig) -> None:
        self._everything = config.target_modules == ALL_LINEAR
        self._targets = _Names(config.target_modules)
        self._excluded = _Names(config.exclude_modules or ())
        self._kept = [containing_pattern(text) for text in config.modules_to_not_convert or ()]
        self._blocks = frozenset(config.layers_to_transform or ())
        # The block index: the first number in a name, or the number after `layers_pattern`.
        blocks = config.layers_pattern
        before = rf"(?:.*?\.)?{blocks}" if blocks else r".*?\.[^.]*"
        self._block = re.compile(rf"{before}\.(\d+)\.")

    def names(self, name: str) -> bool:
        """Return whether `target_modules` is a list and an entry names the module."""
        return self._targets.listed and self._targets.match(name)

    def names_in_full(self, name: str) -> bool:
        """Return whether the list has the full name; `layers_to_transform` then does not apply."""
        return self._targets.has(name)

    def why_not(self, name: str) -> str | None:
        """Return the reason why the config does not select a name, or None if it does."""
        if any(kept.match(name) for kept in self._kept):
            return EXCLUDED[0]
        if self._excluded.match(name):
            return EXCLUDED[1]
        if not (self._everything or self._targets.match(name)):
            return "not a target"
        if self._blocks and not self.names_in_full(name) and self.block(name) not in self._blocks:
            return "not in layers_to_transform"
        return None

    def block(self, name: str) -> int | None:
        """Return the index of the block that contains a module, as `layers_to_transform` counts."""
        found = self._block.match(name)
        return int(found[1]) if found else None


class _Names:
    """A list of names and name suffixes, or a regular expression for full names."""

    def __init__(self, names: str | tuple[str, ...]) -> None:
        self.listed = not isinstance(names, str)
        self._names = frozenset() if isinstance(names, str) else frozenset(names)
        self._pattern = name_pattern(names) if isinstance(names, str) else None

    def has(self, name: str) -> bool:
        """Return whether the list has the full name."""
        return name in self._names

    def match(self, name: str) -> bool:
        if self._pattern is not None:
            return bool(self._pattern.fullmatch(name))
        return any(end in self._names for end in ends(name))


def ends(name: str) -> list[str]:
    """Return a dotted name and all its dotted suffixes, longest first."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
