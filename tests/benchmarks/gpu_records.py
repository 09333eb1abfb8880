"""What tests of `make gpu` share: a machine, and a part that is run."""

from __future__ import annotations

import json

from on_gpu import record as records
from on_gpu.record import Clock, Entry

FACTS = {"device": "cuda", "gpu": "A GPU", "torch": "2.8.0", "transformers": "5.1", "quick": False}


class EndsAfter(Clock):
    """A clock that has run out when it has been looked at so often."""

    def __init__(self, looks: int) -> None:
        super().__init__(None)
        self.looks = looks

    def left(self) -> float:
        self.looks -= 1
        return float("inf") if self.looks >= 0 else 0.0


def measure(part, entry: Entry, clock: Clock | None = None, **options) -> list[str]:
    """Run a part; returns what it said."""
    said: list[str] = []
    written = lambda: json.dumps(vars(entry))  # noqa: E731
    clock = clock or Clock(None)
    records.run_part("part", part, None, entry, clock, written=written, say=said.append, **options)
    return said
