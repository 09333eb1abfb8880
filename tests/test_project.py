"""The project's own files agree: versions, changelog, citation, workflow, the map of rooms."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import yaml
from mutants import MUTANTS
from packaging.version import Version
from paths import ROOT

import metis_hf

PYPROJECT = (ROOT / "pyproject.toml").read_text()
PAPER = "2509.00404"


def test_one_version():
    assert re.search(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)[1] == metis_hf.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == metis_hf.__version__
    assert PAPER in citation["references"][0]["url"]


def test_changelog_has_the_version_and_a_place_for_what_comes():
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, last = re.findall(r"^## (\S+)", text, re.MULTILINE)[:2]
    version = Version(metis_hf.__version__)
    assert unreleased == "Unreleased"
    assert version > Version(last) if version.is_devrelease else version == Version(last)
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Breaks", "Removed", "Fixed", "Security"}


def test_workflow_runs_the_script_on_every_python():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["run"]
    runs = {step["run"]: step.get("if", "") for step in job["steps"] if "run" in step}
    assert runs == {
        ".ci/run": "github.event_name != 'schedule'",
        "make test ARGS=--full": "github.event_name == 'schedule'",
        "make test ARGS=--cov": "github.event_name == 'schedule' && matrix.python == '3.13'",
    }
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    least = re.search(r'requires-python = ">=(.*)"', PYPROJECT)[1]
    assert job["strategy"]["matrix"]["python"] == [least, "3.11", "3.12", "3.13"]
    actions = re.findall(r"uses: (.*)", (ROOT / ".github/workflows/ci.yml").read_text())
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", action) for action in actions)


def test_hooks_run_what_lint_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [
        hook["entry"] for repo in config["repos"] for hook in repo["hooks"] if "entry" in hook
    ]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    tools = [line.split()[:2] for line in lint.replace("$(BIN)", ".venv/bin").splitlines()]
    for tool in tools:
        assert any(entry.split()[:2] == tool for entry in entries), tool


def test_every_room_is_on_the_map():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    package = ROOT / "metis_hf"
    rooms = {f"`{path.parent.name}/`" for path in package.glob("*/__init__.py")}
    rooms |= {f"`{path.name}`" for path in package.glob("*.py") if path.name != "__init__.py"}
    assert sorted(room for room in rooms if room not in text) == []


def test_the_text_of_every_mutant_stands_once_in_the_package():
    for mutant in MUTANTS:
        place = ROOT / "metis_hf" / mutant.place
        files = [place] if place.is_file() else place.rglob("*.py")
        assert sum(file.read_text().count(mutant.old) for file in files) == 1, mutant
        for name in mutant.tests:
            assert (ROOT / "tests" / name.split("::")[0]).exists(), mutant


@pytest.mark.slow
def test_every_process_collects_the_same_tests():
    """Names of tests have no text that the hash seed orders: processes of xdist compare them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts="]
    collecting = [
        subprocess.Popen(
            [*command, "-p", "no:cacheprovider", ROOT / "tests"],
            env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True,
        )
        for seed in ("1", "2", "3")
    ]  # fmt: skip
    texts = [process.communicate()[0] for process in collecting]
    names = [[line for line in text.splitlines() if "::" in line] for text in texts]
    assert len(names[0]) > 1000
    assert names[0] == names[1] == names[2]
