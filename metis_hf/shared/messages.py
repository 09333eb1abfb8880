"""Values as error messages show them."""

from __future__ import annotations

import reprlib


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
