"""Name matching by the rules of PEFT's `check_target_module_exists`, in linear time.

PEFT matches with `re`, which takes exponential time on some patterns. A config may come from an
untrusted checkpoint, so RE2 matches here. The tests compare these rules with PEFT's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from metis_hf.config import MetisConfig
from metis_hf.shared.patterns import containing_pattern, name_pattern

ALL_LINEAR = "all-linear"
EXCLUDED = ("in modules_to_not_convert", "excluded by exclude_modules")


class NameRules:
    """Decides by name whether `target_modules`, `exclude_modules` etc. select a module."""

    def __init__(self, config: MetisConfig) -> None:
        self._everything = config.target_modules == ALL_LINEAR
        targets = config.target_modules
        self._listed = frozenset(() if isinstance(targets, str) else targets)
        self._targets = _matcher(targets)
        self._excluded = _matcher(config.exclude_modules or ())
        self._kept = [containing_pattern(text) for text in config.modules_to_not_convert or ()]
        self._blocks = frozenset(config.layers_to_transform or ())
        # The block index: the first number in a name, or the number after `layers_pattern`.
        blocks = config.layers_pattern
        before = rf"(?:.*?\.)?{blocks}" if blocks else r".*?\.[^.]*"
        self._block = re.compile(rf"{before}\.(\d+)\.")

    def names(self, name: str) -> bool:
        """Return whether `target_modules` is a list and an entry names the module."""
        return any(end in self._listed for end in ends(name))

    def names_in_full(self, name: str) -> bool:
        """Return whether the list has the full name; `layers_to_transform` then does not apply."""
        return name in self._listed

    def why_not(self, name: str) -> str | None:
        """Return the reason why the config does not select a name, or None if it does."""
        if any(kept.match(name) for kept in self._kept):
            return EXCLUDED[0]
        if self._excluded(name):
            return EXCLUDED[1]
        if not (self._everything or self._targets(name)):
            return "not a target"
        if self._blocks and not self.names_in_full(name) and self.block(name) not in self._blocks:
            return "not in layers_to_transform"
        return None

    def block(self, name: str) -> int | None:
        """Return the index of the block that contains a module, as `layers_to_transform` counts."""
        found = self._block.match(name)
        return int(found[1]) if found else None


def _matcher(names: str | tuple[str, ...]) -> Callable[[str], bool]:
    """Return the test for a list of names and name suffixes, or a pattern of full names."""
    if isinstance(names, str):
        pattern = name_pattern(names)
        return lambda name: bool(pattern.fullmatch(name))
    listed = frozenset(names)
    return lambda name: any(end in listed for end in ends(name))


def ends(name: str) -> list[str]:
    """Return a dotted name and all its dotted suffixes, longest first."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
