"""Pages without the pictures on them: saving a picture takes most of the time of a page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure


def save_nothing(_, file, **__) -> None:
    """Stand for Figure.savefig, which takes a path or an open file."""
    if isinstance(file, str | Path):
        Path(file).write_bytes(b"drawn")
    else:
        file.write(b"drawn")


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Save five bytes in place of each picture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_nothing)
        yield
