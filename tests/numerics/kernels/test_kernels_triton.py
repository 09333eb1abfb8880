"""Triton kernels in the interpreter on CPU, and when they run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch
from design import full
from paths import ROOT

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import choice, use_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
compiles = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or INTERPRETED,
    reason="triton is not installed, or TRITON_INTERPRET=1: it compiles nothing",
)
CASES = ("triton", "call", "epilogue", "sums", "projection", "rotation", "basis", "low_rank")
CASES += ("failing",)
WHOLE = "call or epilogue or sums or projection or rotation or basis or low_rank or failing"
SOME = f"(normal or nan or wide) and not subnormal or {WHOLE}"  # where not all run


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """Cases, in a process of their own: the choice is made when triton is imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-n", "2"]
    command += [] if full() else ["-k", SOME]
    run = subprocess.run(
        [*command, *(f"tests/numerics/kernels/{name}_cases.py" for name in CASES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed
    assert int(passed[1]) >= (60 if full() else 5)
    assert "skipped" not in run.stdout


def test_without_triton_the_request_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(choice, "triton_backend", lambda: None)
    with use_kernels("triton"), pytest.raises(RuntimeError, match="there is no package triton"):
        Quantizer()(torch.zeros(16, 16))


@needs_triton
def test_older_releases_are_refused(monkeypatch) -> None:
    """Their division flushes subnormal numbers: results would not be equal."""
    import triton

    missing = choice.triton_backend().missing
    monkeypatch.setattr(triton, "__version__", "3.10.0+git1234")
    assert missing(torch.device("cuda")) is None
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "triton 3.6 or later (division in 3.5.1 " in missing(torch.device("cuda"))


@compiles
def test_on_cpu_the_request_is_refused() -> None:
    missing = r"there is no (CUDA device|triton 3\.6)"
    with use_kernels("triton"), pytest.raises(RuntimeError, match=missing):
        Quantizer()(torch.zeros(16, 16))
