"""Short names of layers on figures and pages: the block, and the layer within it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_SIDES = ("encoder", "decoder")
_LEFT_OUT = ("self_attn", "mlp")  # what stands behind them tells layers apart
_FEWEST = 2  # parts of a name that are shown

Tail = tuple[str, ...]


@dataclass(frozen=True)
class _Parts:
    """The parts of a layer's name: what stands before its first index, the index, the rest."""

    head: str
    index: str
    tail: Tail

    @property
    def block(self) -> str:
        """Return "3", "encoder 3" or "decoder 3"."""
        side = next((part for part in self.head.split(".") if part in _SIDES), "")
        return f"{side} {self.index}".strip()


def places(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return (block, layer) of layers by name: its first index, and the end of what follows it.

    Encoders and decoders count their blocks apart: "encoder 3", "decoder 3". Of the rest as much is
    kept as tells the layers apart, and the last two parts at least.
    """
    split, found = {}, {}
    for name in dict.fromkeys(names):
        match = re.search(r"^(.*?)\.(\d+)\.(.+)$", name)
        if match is None:
            found[name] = ("-", name)
        else:
            split[name] = _Parts(match[1], match[2], tuple(match[3].split(".")))
    split = _without_plain_parts(split)
    twice = Counter((parts.block, parts.tail) for parts in split.values())
    alike = {block for (block, _), count in twice.items() if count > 1}  # of two lists of blocks
    blocks = {
        name: f"{parts.head} {parts.index}" if parts.block in alike else parts.block
        for name, parts in split.items()
    }
    tails: dict[str, set[Tail]] = defaultdict(set)
    for name, parts in split.items():
        tails[blocks[name]].add(parts.tail)
    shown = _ends(tails.values())
    found |= {name: (blocks[name], shown[parts.tail]) for name, parts in split.items()}
    return found


def _without_plain_parts(split: dict[str, _Parts]) -> dict[str, _Parts]:
    """Leave out `_LEFT_OUT`, unless two layers of a block would then have one name."""
    shorter = {
        name: _Parts(
            parts.head, parts.index, tuple(part for part in parts.tail if part not in _LEFT_OUT)
        )
        for name, parts in split.items()
    }
    counts = Counter(shorter.values())
    return {
        name: parts if counts[parts] == 1 and parts.tail else split[name]
        for name, parts in shorter.items()
    }


def _ends(blocks: Iterable[set[Tail]]) -> dict[Tail, str]:
    """Return the shortest end of each tail that no other of its blocks has, else the whole of it.

    The whole of one tail is no other's end: that one is then longer.
    """
    fewest: dict[Tail, int] = {}
    for tails in blocks:
        counts = Counter(tail[-size:] for tail in tails for size in range(1, len(tail) + 1))
        for tail in tails:
            sizes = range(_FEWEST, len(tail))
            size = next((size for size in sizes if counts[tail[-size:]] == 1), len(tail))
            fewest[tail] = max(size, fewest.get(tail, 0))
    return {tail: ".".join(tail[-size:]) for tail, size in fewest.items()}
