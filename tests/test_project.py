"""The project's own files agree: versions, changelog, citation, workflow, rooms, tests' reading."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import yaml
from mutants import MUTANTS
from packaging.version import Version
from paths import ROOT

import metis_hf

PYPROJECT = (ROOT / "pyproject.toml").read_text()
PAPER = "2509.00404"
FOREIGN = {*dir(torch.nn.Module()), *dir(os)}  # private names of others that we have too


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


def private_names(source: str) -> Iterator[str]:
    """Private functions, classes, variables of modules and classes, and attributes of self."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        if isinstance(node, ast.Module | ast.ClassDef):
            assigned = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
            names += [n.id for each in assigned for n in ast.walk(each) if isinstance(n, ast.Name)]
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr] if getattr(node.value, "id", "") == "self" else []
        yield from (name for name in names if re.match("_(?!_)", name) and name not in FOREIGN)


def names_read(test: str) -> Iterator[str]:
    """Names that a test imports or reads off something, as `x.name` or by the text "name"."""
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self":
            yield node.attr
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("getattr", "hasattr", "setattr", "delattr", "object", "patch"):
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                yield from (str(text).split(".")[-1] for text in texts)


@pytest.mark.parametrize(
    "test",
    [
        "from metis_hf.x import _f",
        "x._f(2)",
        "x._Class.part",
        "x._LIMIT",
        "layer._state",
        'monkeypatch.setattr(x, "_f", None)',
        'mock.patch("metis_hf.x._f")',
    ],
)
def test_private_names_are_found(test):
    source = (
        "_LIMIT: int = 1\n"
        "def _f(): ...\n"
        "class _Class(nn.Module):\n"
        "    def __init__(self): self._state = 1\n"
        "    def _apply(self): ...\n"
    )
    names = {*private_names(source)}
    assert names == {"_LIMIT", "_f", "_Class", "_state"}
    assert names & {*names_read(test)}


def test_tests_read_no_private_names():
    """Neither the package's, nor those of benchmarks, studies and recipes."""
    rooms = ("metis_hf", "benchmarks", "eval", "recipes")
    sources = [path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py")]
    private = {name for source in sources for name in private_names(source)}
    assert len(private) > 500
    tests = {path: {*names_read(path.read_text())} for path in (ROOT / "tests").rglob("*.py")}
    found = {str(path.relative_to(ROOT)): names & private for path, names in tests.items()}
    assert not {path: names for path, names in found.items() if names}


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
