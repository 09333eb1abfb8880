"""What tests of the lab share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.show.undrawn import undrawn


@pytest.fixture(scope="module")
def no_pictures() -> Iterator[None]:
    """Keep a module's tests from saving pictures."""
    with undrawn():
        yield
