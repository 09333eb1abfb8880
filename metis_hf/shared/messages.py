"""Error messages: the values that they show, and one line instead of a traceback."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class _Shown(reprlib.Repr):
    """Cuts what is long or deep: a value that is refused may come from a broken file."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 12
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"<an integer of {x.bit_length()} bits>"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """Return the repr of a value, shortened where it is long or deeply nested."""
    return _SHOWN.repr(value)


def some(names: Sequence[str], most: int = 4) -> str:
    """Return the first names in a line, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one line where the block, before any training, refuses what is asked."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
