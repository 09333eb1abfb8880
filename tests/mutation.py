"""Measure what the tests catch: `python tests/mutation.py` puts mutants in, one by one.

Each mutant of `mutants.py` goes into a copy of the tree; the files of tests that it names run until
one fails, then, if none did, all tests of the numerics. Run by hand: an hour on one core. What was
found is in mutation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path = [path for path in sys.path if Path(path or ".").resolve() != HERE]
WIDER = ("numerics", "operands", "layers", "schemes", "test_noise.py")
LEFT_OUT = ("layers/test_no_sync.py", "layers/test_compile.py")  # of the wider run: compilations


class Result(NamedTuple):
    """What became of one mutant."""

    name: str
    state: str  # "caught", "survived", "out of time" (not known which), "not applied"
    by: str  # the first test that failed
    seconds: float


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", choices=("short", "full"), default="short")
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants")
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="checkout to run on")
    parser.add_argument("--out", type=Path, help="JSON lines to append to; those there are kept")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one mutant")
    parser.add_argument("--check", action="store_true", help="only look for the mutants' places")
    parser.add_argument("--table", nargs=2, type=Path, metavar=("FULL", "SHORT"),
                        help="write the table of two files of results")  # fmt: skip
    options = parser.parse_args()

    mutants = load_mutants()
    if options.table:
        print(table(mutants, *options.table))
        return
    known = {mutant.name for mutant in mutants}
    if unknown := set(options.only) - known:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    done = read_results(options.out)
    chosen = [m for m in mutants if m.name in (options.only or known) and m.name not in done]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        copy_tree(options.tree, copy)
        if not options.check:
            preload(copy)
        for mutant in chosen:
            result = try_mutant(mutant, copy, options)
            print(
                f"{result.state:12} {result.seconds:5.0f} s  {mutant.name}  {result.by}", flush=True
            )
            if options.out and not options.check:
                with options.out.open("a") as file:
                    file.write(json.dumps(result._asdict()) + "\n")


def load_mutants():
    """Return the mutants that stand beside this script."""
    sys.path.insert(0, str(HERE))
    from mutants import MUTANTS

    sys.path.remove(str(HERE))
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)), "two mutants of one name"
    return MUTANTS


def read_results(out: Path | None) -> dict[str, Result]:
    """Return the results in a file by the names of the mutants."""
    if out is None or not out.exists():
        return {}
    results = [Result(**json.loads(line)) for line in out.read_text().splitlines()]
    return {result.name: result for result in results}


def table(mutants, full: Path, short: Path) -> str:
    """Return a table of all mutants in Markdown, with what the two suites made of them."""
    found = [read_results(full), read_results(short)]
    lines = [
        "| mutant | what is wrong | full suite | short suite | the test that failed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for mutant in mutants:
        results = [results.get(mutant.name) for results in found]
        states = [result.state if result else "not run" for result in results]
        by = re.sub(r"\[.*", "", results[1].by) if results[1] else ""
        lines.append(f"| {mutant.name} | {mutant.breaks} | {states[0]} | {states[1]} | {by} |")
    for name, results in zip(("full", "short"), found):
        caught = sum(result.state == "caught" for result in results.values())
        lines.append(f"\nThe {name} suite caught {caught} of the {len(results)} that ran with it.")
    return "\n".join(lines)


def copy_tree(source: Path, target: Path) -> None:
    """Copy what tests read of a checkout."""
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
    shutil.copytree(source, target, ignore=left_out)


def preload(copy: Path) -> None:
    """Import what takes seconds and is none of the package's: children are forks of this process.

    Every module compiles from source there: a file that changes twice a second would leave stale
    byte code.
    """
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(copy))
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    import hypothesis
    import ml_dtypes
    import pytest
    import torch
    import transformers
    import transformers.trainer
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.llama import modeling_llama

    assert all((hypothesis, ml_dtypes, pytest, torch, transformers, modeling_gpt2, modeling_llama))
    assert not [name for name in sys.modules if name.split(".")[0] == "metis_hf"]


def try_mutant(mutant, copy: Path, options: argparse.Namespace) -> Result:
    """Put one mutant in, run tests until one fails, take it out again."""
    found = [
        path
        for path in sources(copy / "metis_hf" / mutant.place)
        for _ in range(path.read_text().count(mutant.old))
    ]
    if len(found) != 1:
        return Result(mutant.name, "not applied", f"its text stands in {len(found)} places", 0.0)
    if options.check:
        return Result(mutant.name, "applies", "", 0.0)
    path, start = found[0], time.monotonic()
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        state, by = run_tests(mutant.tests, copy, options)
        if state == "survived":
            state, by = run_tests(WIDER, copy, options, LEFT_OUT)
    finally:
        path.write_text(original)
    return Result(mutant.name, state, by, round(time.monotonic() - start, 1))


def sources(place: Path) -> list[Path]:
    """Return the Python files of a room, or the one file."""
    return sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.exists() else []


def run_tests(
    files: tuple[str, ...], copy: Path, options: argparse.Namespace, left_out: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Return (state, first failing test) of a run in a process of its own."""
    log = copy.parent / "log"
    child = os.fork()
    if child == 0:
        run_in_child(files, copy, log, options.tests == "full", left_out)
    end = time.monotonic() + options.limit
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "out of time", ""
    code = os.waitstatus_to_exitcode(status)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.M)
    if code == 0:
        return "survived", ""
    return "caught", failed[1].removeprefix("tests/") if failed else f"exit code {code}"


def run_in_child(
    files: tuple[str, ...], copy: Path, log: Path, full: bool, left_out: tuple[str, ...]
) -> None:
    """Run pytest on files below tests/; does not return."""
    code = 70
    try:
        os.setpgid(0, 0)
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(copy)
        import pytest

        present = [
            f"tests/{name}" for name in files if (copy / "tests" / name.split("::")[0]).exists()
        ]
        ignored = [f"--ignore=tests/{name}" for name in left_out]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", *ignored]
        code = pytest.main([*options, *(["--full"] if full else []), *present])
    finally:
        sys.stdout.flush()
        os._exit(int(code))


if __name__ == "__main__":
    main()
