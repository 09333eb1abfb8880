"""Error messages: the values that they show, and one line instead of a traceback.

Errors that a user can mend are `MENDABLE`; a command prints them in one line. Any other is a bug of
ours, with a traceback. What software trips over in files that somebody sent is no bug of ours:
`reading` makes it mendable, and names the file or directory.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MENDABLE = (ValueError, OSError, NotImplementedError, ImportError)
_LONGEST = 2000  # characters of a message


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


def one_line(error: BaseException) -> str:
    """Return the message of an error, which may quote a file, as one line that a terminal prints.

    Control characters become escapes, and what is very long is cut.
    """
    lines = (line.strip() for line in str(error).splitlines())
    text = " ".join(line for line in lines if line)
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: _LONGEST + 1])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Refuse in one line what other software cannot read in a model or a record.

    Args:
        what: is read, a path or a name on the hub.

    Raises:
        ValueError: the block raised what is not mendable; the message has `what` and the error.
    """
    try:
        yield
    except MENDABLE:
        raise
    except Exception as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError":  # of a device, whose message says what is in use
            raise
        if kind == "UnpicklingError":  # torch's message names the way to run the code
            raise ValueError(
                f"{what} holds Python objects beside tensors, which could run code, and is not "
                "read; ask for the weights as safetensors"
            ) from error
        raise ValueError(
            f"{what} cannot be read ({kind}: {one_line(error)}): its files are damaged, or do not "
            "belong together"
        ) from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one line where the block, before any training, refuses what is asked."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
