"""These tests are about the definition; test_kernels.py compares what is compiled with it."""

import pytest

from metis_hf.numerics.kernels import use_kernels


@pytest.fixture(autouse=True, scope="package")
def _reference():
    with use_kernels("reference"):
        yield
