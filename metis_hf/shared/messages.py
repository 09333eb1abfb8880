"""Error messages: formatting of values, and one-line errors instead of tracebacks.

Commands print `MENDABLE` errors, which a user can fix, in one line. Other errors are bugs and keep
their traceback. Errors that other libraries raise on damaged files are not bugs: `reading` converts
them to a ValueError that names the file or directory.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MENDABLE = (ValueError, OSError, NotImplementedError, ImportError)
_LONGEST = 2000  # most characters of a message


class _Shown(reprlib.Repr):
    """Shortens long or deeply nested values: refused values may come from a broken file."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 12
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"<an integer of {x.bit_length()} bits>"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """Return the repr of a value, shortened if it is long or deeply nested."""
    return _SHOWN.repr(value)


def some(names: Sequence[str], most: int = 4) -> str:
    """Return the first names in one line, and the number of further names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line that is safe to print on a terminal.

    Control characters, which a quoted file may contain, become escapes; long messages are cut.
    """
    lines = (line.strip() for line in str(error).splitlines())
    text = " ".join(line for line in lines if line)
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: _LONGEST + 1])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Convert errors that are not `MENDABLE` to a ValueError that names `what`, a path or hub name.

    Raises:
        ValueError: the block raised an error that is not `MENDABLE`, other than out of memory.
    """
    try:
        yield
    except MENDABLE:
        raise
    except Exception as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError":  # its message reports the memory in use
            raise
        if kind == "UnpicklingError":  # torch's message tells how to run the code
            raise ValueError(
                f"{what} contains Python objects besides tensors, which could run code, so it is "
                "not read; get the weights as safetensors"
            ) from error
        raise ValueError(
            f"{what} cannot be read ({kind}: {one_line(error)}): its files are damaged or do not "
            "match"
        ) from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit with status 2 and a one-line message if the block raises an error of these types."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
