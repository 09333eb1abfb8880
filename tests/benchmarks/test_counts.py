"""Launches of one layer on a CUDA device, forward and backward, counted without one."""

from __future__ import annotations

import importlib.util
import os

import pytest
from design import some_slow

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is not installed, or interprets kernels",
)
# Beside these an H200 starts four more: a copy of the input by a script that measures, and
# three of cuBLAS.
MOST = {
    "nn.Linear": 3,
    "nvfp4-rne": 14,
    "w4a4": 19,
    "nvidia": 15,
    "four-over-six": 15,
    "quartet2": 19,
    "metis": 45,
    "metis, kept subspaces": 29,
}


@pytest.mark.parametrize("scheme", some_slow(MOST, ["four-over-six", "w4a4"]))
def test_launches_of_a_layer(scheme) -> None:
    import counts

    found = counts.launches(scheme)
    assert 3 <= found.total <= MOST[scheme], (found.triton, found.torch)
    assert found.triton["quantize"] >= 3 or scheme == "nn.Linear"
