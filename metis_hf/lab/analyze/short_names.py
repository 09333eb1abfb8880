"""Short layer names for figures and pages: the block, and the layer within it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_PLAIN = re.compile(r"\b(self_attn|mlp)\.")  # dropped: the rest of the name suffices


def short_names(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return full name -> (block, layer within it).

    The block is the first index in a name, prefixed with the name of its block list if there are
    several lists; "-" for a layer outside all blocks.
    """
    names = list(dict.fromkeys(names))
    split = {name: re.fullmatch(r"(.*?)\.(\d+)\.(.+)", name) for name in names}
    lists = {match[1] for match in split.values() if match}
    found = {}
    for name, match in split.items():
        block = "-" if match is None else match[2] if len(lists) == 1 else f"{match[1]} {match[2]}"
        found[name] = block, name if match is None else match[3]
    shorter = {name: (block, _PLAIN.sub("", tail)) for name, (block, tail) in found.items()}
    counts = Counter(shorter.values())
    return {name: each if counts[each] == 1 else found[name] for name, each in shorter.items()}
