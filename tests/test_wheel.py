"""The wheel: what is in it, and that it runs without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from paths import ROOT

SOURCES = ("pyproject.toml", "README.md", "LICENSE")
DATA = {
    "metis_hf/numerics/kernels/cpu.cpp",
    "metis_hf/py.typed",
    "metis_hf/lab/evaluate/paper_tables.json",
    "metis_hf/lab/compare/quartet2_grid.json",
    "metis_hf/lab/show/page.html",
}


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources: a build leaves files beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in ("metis_hf", "recipes", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
        "--no-index", "-q", "-w", folder, copy,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_the_package_and_its_data(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = (ROOT / "metis_hf").rglob("*.py")
    assert names == DATA | {path.relative_to(ROOT).as_posix() for path in package}


@pytest.mark.slow
def test_wheel_runs_the_demo_outside_the_checkout(wheel, tmp_path):
    place, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(
        sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q",
        "--target", place, wheel,
    )  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(place)}
    options = {"cwd": elsewhere, "env": environment}
    where = run(sys.executable, "-c", "import metis_hf; print(metis_hf.__file__)", **options)
    assert where.startswith(str(place))
    run(
        place / "bin/metis-hf", "demo", "--quick", "--schemes", "bf16,nvfp4", "--steps", "2",
        **options,
    )  # fmt: skip
    record = json.loads((elsewhere / "runs/quick/compare.json").read_text())
    assert [result["scheme"] for result in record["runs"]] == ["bf16", "nvfp4"]
