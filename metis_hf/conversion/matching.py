"""Names that a config means: the rules of PEFT's `check_target_module_exists`, in bounded time.

PEFT matches with `re`, which some patterns keep busy for ever; a config comes from other people's
checkpoints, so RE2 matches here. The tests hold these rules to PEFT's own.
"""

from __future__ import annotations

import re

from metis_hf.config import MetisConfig
from metis_hf.shared.patterns import containing_pattern, name_pattern

ALL_LINEAR = "all-linear"
EXCLUDED = ("in modules_to_not_convert", "excluded by exclude_modules")


class NameRules:
    """The verdict of `target_modules`, `exclude_modules` and the options beside them on names."""

    def __init__(self, config: MetisConfig) -> None:
        self._everything = config.target_modules == ALL_LINEAR
        self._targets = _Names(config.target_modules)
        self._excluded = _Names(config.exclude_modules or ())
        self._kept = [containing_pattern(text) for text in config.modules_to_not_convert or ()]
        self._blocks = frozenset(config.layers_to_transform or ())
        # The first number in a name, or the one behind the list of blocks that the config names.
        blocks = config.layers_pattern
        before = rf"(?:.*?\.)?{blocks}" if blocks else r".*?\.[^.]*"
        self._block = re.compile(rf"{before}\.(\d+)\.")

    def names(self, name: str) -> bool:
        """Return whether an entry of a list (not a regular expression) names the module."""
        return self._targets.listed and self._targets.match(name)

    def names_in_full(self, name: str) -> bool:
        """Return whether a list has the whole name; `layers_to_transform` does not apply to it."""
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
        """Return the index of the block that a module lies in, as `layers_to_transform` counts."""
        found = self._block.match(name)
        return int(found[1]) if found else None


class _Names:
    """A list of names and ends of names, or a regular expression for whole names."""

    def __init__(self, names: str | tuple[str, ...]) -> None:
        self.listed = not isinstance(names, str)
        self._names = frozenset() if isinstance(names, str) else frozenset(names)
        self._pattern = name_pattern(names) if isinstance(names, str) else None

    def has(self, name: str) -> bool:
        """Return whether the list has the name in full."""
        return name in self._names

    def match(self, name: str) -> bool:
        if self._pattern is not None:
            return bool(self._pattern.fullmatch(name))
        return any(end in self._names for end in ends(name))


def ends(name: str) -> list[str]:
    """Return a dotted name and what stands behind each of its dots."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
