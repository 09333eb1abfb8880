"""The part `tests`: the tests that need a GPU, each class or file in its own process."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from timing import Row

from on_gpu import ROOT
from on_gpu.context import Context
from on_gpu.record import FAILURES, Clock, CutOff, Item, Skipped

MARK = "gpu"  # tests/conftest.py marks every test that is skipped without a CUDA device
_NEEDS_CUDA = re.compile(r"cuda\.is_available|mark\.gpu")
_LINES = 25  # lines of pytest's output in an error
_NOTHING_RAN, _FAILED = 5, 1  # exit codes of pytest
_MOST_PROCESSES = 8  # each uses some of the GPU's memory


def tests(context: Context) -> Iterator[Item]:
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("the package pytest is not installed")
    found = groups()
    if context.device.type != "cuda":
        raise Skipped(f"{len(found)} files or classes of tests need a CUDA device")
    for group in found:
        yield Item(group, functools.partial(run_group, group, context.clock))


@functools.cache  # collecting takes seconds, and a call may run this twice
def groups(root: Path = ROOT) -> tuple[str, ...]:
    """Return the test files that need a GPU, or their classes and functions, as pytest names.

    Only files that mention CUDA are collected: others may need packages that are not installed.
    """
    files = [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if _NEEDS_CUDA.search(path.read_text("utf-8"))
    ]
    if not files:
        raise Skipped("no test of the suite needs a GPU")
    done = _pytest(root, "--collect-only", *files)
    if done.returncode not in (0, _NOTHING_RAN):
        raise RuntimeError(_tail(done))
    nodes = [line.strip() for line in done.stdout.splitlines() if "::" in line]
    if not nodes:
        raise Skipped(f"none of {', '.join(files)} has a test that needs a GPU")
    parts = [node.split("[")[0].split("::") for node in nodes]
    with_classes = {file for file, *names in parts if len(names) > 1}
    # Each process spends seconds on imports, so a file without classes is one group.
    groups = ["::".join(part[:2]) if part[0] in with_classes else part[0] for part in parts]
    return tuple(dict.fromkeys(groups))


def run_group(group: str, clock: Clock, root: Path = ROOT) -> Row:
    """Run one group, and return its counts; every failed test is listed under FAILURES.

    Raises:
        CutOff: the call's time ran out first.
    """
    left = clock.left()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        try:
            done = _pytest(
                root, *side_by_side(os.cpu_count() or 1), group, f"--junitxml={report}",
                timeout=None if math.isinf(left) else left,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CutOff(f"it had not ended after {left:.0f} s") from None
        if done.returncode not in (0, _FAILED) or not report.is_file():
            raise RuntimeError(_tail(done))
        return counts(report.read_text("utf-8"))


def counts(report: str) -> Row:
    """Return the counts, reasons and failures of pytest's JUnit report."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed: list[str] = []
    skipped: list[str] = []
    for case in cases:
        for kind, found in (("failure", failed), ("error", failed), ("skipped", skipped)):
            for node in case.findall(kind):
                message = (node.get("message") or "").split("\n")[0]
                found.append(message if kind == "skipped" else f"{case.get('name')}: {message}")
    row: Row = {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
    }
    if skipped:
        row["skipped_because"] = sorted(set(skipped))
    if failed:
        row[FAILURES] = failed
    return row


def side_by_side(cores: int) -> list[str]:
    """Return pytest options for several cores: these tests spend most of their time compiling."""
    processes = min(_MOST_PROCESSES, cores // 2)
    there = importlib.util.find_spec("xdist") is not None
    return ["-n", str(processes)] if there and processes > 1 else []


def _pytest(
    root: Path, *arguments: str, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-m", MARK, "-p", "no:cacheprovider", *arguments]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        command, cwd=root, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:  # kill pytest's workers too, which would disturb later timings
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()[-_LINES:]
    return f"pytest ended with {done.returncode}:\n" + "\n".join(lines)
