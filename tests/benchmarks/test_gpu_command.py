"""The command `make gpu`: what it measures, takes up, keeps and refuses; how it ends."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from functools import partial

import gpu
import pytest
import torch
from on_gpu import record as records
from on_gpu import suite
from on_gpu.record import Clock, CutOff, Item, OutOfTime, Skipped

from metis_hf.data.chunked import META, REQUIRED


def skipped(_context):
    raise Skipped("no tokens were given")


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that runs the command with parts of our own: (exit status, what it said)."""
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "benchmarks" / "results")

    def run(known, *options: str) -> tuple[int, list[str]]:
        said: list[str] = []
        names = {**dict.fromkeys(gpu.PARTS, skipped), **known}
        args = gpu.arguments(["--device", "cpu", *options])
        return gpu.run(args, names, said.append), said

    return run


def good(_context):
    return [Item("x", lambda: {"rows": []})]


def bad(_context):
    return [Item("x", lambda: 1 / 0)]


def test_exit_status_is_that_of_the_parts_that_were_asked_for(call):
    assert call({"kernels": good})[0] == 0
    assert call({"layer": bad}, "--parts", "layer,kernels")[0] == 1
    assert call({"layer": bad}, "--parts", "kernels")[0] == 0


def test_results_are_copied_and_taken_up_from_the_copy(call, tmp_path):
    out, own = tmp_path / "out", tmp_path / "benchmarks"
    call({"kernels": good}, "--parts", "kernels", "--out", str(out))
    names = {"gpu-cpu.json", "gpu-cpu.md"}
    assert {path.name for path in out.iterdir()} == names
    assert (own / "gpu-cpu.md").read_text() == (out / "gpu-cpu.md").read_text()
    (own / "results" / "gpu-cpu.json").unlink()  # another machine, which has only the copy
    call({"kernels": bad}, "--parts", "kernels", "--out", str(out))
    found = json.loads((own / "results" / "gpu-cpu.json").read_text())
    assert found["parts"]["kernels"]["state"] == records.DONE  # it was not measured again
    assert len(found["calls"]) == 2
    call({"kernels": bad}, "--parts", "kernels", "--again")
    found = json.loads((own / "results" / "gpu-cpu.json").read_text())
    assert found["parts"]["kernels"]["state"] == records.FAILED


def test_a_checkout_that_is_read_only(call, tmp_path, monkeypatch):
    """What cannot be kept is not measured."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "file" / "results")
    measured = []
    with pytest.raises(OSError, match="Not a directory"):
        call({"kernels": lambda context: measured.append(context) or []}, "--parts", "kernels")
    assert not measured
    call({"kernels": good}, "--parts", "kernels", "--out", str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "gpu-cpu.json").read_text())
    assert found["parts"]["kernels"]["state"] == records.DONE


def test_of_record_and_copy_the_later_is_taken_up(call, tmp_path):
    own, out = tmp_path / "benchmarks" / "results" / "gpu-cpu.json", tmp_path / "out"
    call({"kernels": good}, "--parts", "kernels")
    first = own.read_text()
    call({"layer": good}, "--parts", "layer", "--out", str(out))
    later = json.loads((out / "gpu-cpu.json").read_text())
    later["calls"][-1]["began"] = "2999-01-01T00:00:00+00:00"
    (out / "gpu-cpu.json").write_text(json.dumps(later))
    own.write_text(first)  # as a checkout of the commit before
    call({"step": good}, "--parts", "step", "--out", str(out))
    found = json.loads(own.read_text())
    assert {"kernels", "layer", "step"} <= found["parts"].keys()
    (out / "gpu-cpu.json").write_text(json.dumps({**later, "calls": []}))  # the earlier one
    call({}, "--parts", "native", "--out", str(out))
    assert "step" in json.loads(own.read_text())["parts"]
    later["machine"]["torch"] = "1.0"
    (out / "gpu-cpu.json").write_text(json.dumps(later))
    before = own.read_text()
    with pytest.raises(ValueError, match=r"has results with torch '1\.0'"):
        call({}, "--parts", "native", "--out", str(out))
    assert own.read_text() == before


def test_a_quick_run_leaves_records_and_checkpoints_alone(call, tmp_path):
    folders = []

    def part(context):
        folders.append(context.work.name)
        return good(context)

    call({"kernels": part}, "--parts", "kernels", "--quick", "--out", str(tmp_path / "quick"))
    assert not (tmp_path / "benchmarks").exists()
    assert "quick run" in (tmp_path / "quick" / "gpu-cpu.md").read_text()
    call({"kernels": part}, "--parts", "kernels")
    assert folders == ["gpu-cpu-quick", "gpu-cpu"]


def test_when_the_minutes_are_over_it_says_so(call):
    status, said = call({"kernels": good}, "--minutes", "0", "--parts", "kernels")
    assert status == 0
    assert said[0] == "kernels: to come"
    assert said[-1] == "the minutes are over: run the same command to continue from here"


@pytest.mark.parametrize("options", [(), ("--again",)], ids=str)
def test_a_part_that_failed_stays_failed_where_it_is_not_measured(call, tmp_path, options):
    call({"kernels": bad}, "--parts", "kernels")
    status, _ = call({"kernels": skipped}, "--parts", "kernels", *options)
    found = json.loads((tmp_path / "benchmarks" / "results" / "gpu-cpu.json").read_text())
    assert (status, found["parts"]["kernels"]["state"]) == (1, records.FAILED)
    assert found["parts"]["kernels"]["errors"]


def test_results_that_again_does_not_replace_stay(call, tmp_path):
    record = tmp_path / "benchmarks" / "results" / "gpu-cpu.json"

    def entry(part: str) -> dict:
        return json.loads(record.read_text())["parts"][part]

    both = ("--parts", "kernels,compare", "--again")
    call({"kernels": good, "compare": good}, *both)
    kept = [entry("kernels"), entry("compare")]
    status, said = call({"kernels": good, "compare": good}, *both, "--minutes", "0")
    assert (status, [entry("kernels"), entry("compare")]) == (0, kept)
    assert said[0] == "kernels: not measured again, no time was left; its earlier results are kept"
    status, said = call({"kernels": good}, *both)  # compare is skipped: no tokens
    assert (status, entry("compare")) == (0, kept[1])
    assert "compare: not measured again; its earlier results are kept" in said

    def breaks(_context):
        raise RuntimeError("nothing was collected")

    status, _ = call({"kernels": breaks}, "--parts", "kernels", "--again")
    assert (status, entry("kernels")["items"]) == (1, kept[0]["items"])
    assert "nothing was collected" in entry("kernels")["errors"][records.ITSELF]
    _, said = call({}, "--parts", "native", "--again", "--minutes", "0")
    command = "the same command without --again"
    assert said[-1] == f"the minutes are over: run {command} to continue from here"


@pytest.mark.parametrize("ended", ["clock", "sigterm"])
def test_again_replaces_one_result_after_the_other(ended, call, tmp_path, monkeypatch):
    """What ends it loses none, and the same command without --again measures the others."""
    record = tmp_path / "benchmarks" / "results" / "gpu-cpu.json"
    monkeypatch.setattr(Clock, "left", lambda clock: 1.0)

    def part(value: int, breaks: bool = False):
        def end() -> dict:
            raise SystemExit if ended == "sigterm" else OutOfTime("no time")

        measure = lambda: {"rows": [], "value": value}  # noqa: E731
        first, *others = (Item(key, measure) for key in "abc")
        return lambda _: [first, Item("b", end)] if breaks else [first, *others]

    def values() -> list[int]:
        entry = json.loads(record.read_text())["parts"]["kernels"]
        return [entry["items"][key]["value"] for key in "abc"]

    options = ("--parts", "kernels")
    call({"kernels": part(1)}, *options)
    with contextlib.suppress(SystemExit):
        call({"kernels": part(2, breaks=True)}, *options, "--again")
    assert values() == [2, 1, 1]
    assert "older results kept until then: b; c" in (tmp_path / "benchmarks/gpu-cpu.md").read_text()
    call({"kernels": part(3)}, *options)
    assert values() == [2, 3, 3]
    assert "older results" not in (tmp_path / "benchmarks/gpu-cpu.md").read_text()


def test_what_fails_each_time_keeps_no_other_part_from_its_turn(call):
    turns = []

    def measured(part: str, error: Exception | None):
        def measure() -> dict:
            turns.append(part)
            if error is not None:
                raise error
            return {"rows": []}

        return lambda _context: [Item(part, measure)]

    parts = {
        "tests": measured("tests", CutOff("it had not ended")),
        "layer": measured("layer", None),
    }
    options = ("--parts", "tests,layer")
    assert call({**parts, "layer": skipped}, *options)[0] == 1
    status, said = call(parts, *options)
    assert (status, turns) == (1, ["tests", "layer", "tests"])
    assert "layer: done" in said
    turns.clear()
    first, second = (measured(name, RuntimeError("x")) for name in ("first", "second"))
    call({"kernels": first}, "--parts", "kernels")
    call({"kernels": lambda _: [*first(_), *second(_)]}, "--parts", "kernels")
    assert turns == ["first", "second", "first"]  # once in a call


def test_other_options_than_those_of_the_results_are_refused(call, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / META).write_text(json.dumps(dict.fromkeys(REQUIRED, 0)))
    for name in ("m", "n"):
        (tmp_path / name).mkdir()
    (tmp_path / "t.txt").write_text("")

    def compared(data: str, *options: str) -> tuple[int, list[str]]:
        given = ("--parts", "compare", "--data", str(tmp_path / data), *options)
        return call({"compare": good}, *given)

    compared("a")
    compared("a")
    for options in (("b",), ("a", "--schemes", "bf16"), ("a", "--train-minutes", "3")):
        with pytest.raises(ValueError, match=r"results of compare with data 'a'.*add --again"):
            compared(*options)
    compared("b", "--again")
    compared("b")
    told = ("--parts", "fidelity", "--text", str(tmp_path / "t.txt"), "--model")
    model, other = str(tmp_path / "m"), str(tmp_path / "n")
    call({"fidelity": lambda _: [Item("metis", lambda: {"reason": "no layer"})]}, *told, model)
    with pytest.raises(ValueError, match=r"fidelity with model 'm', text 't.txt', but .* 'n'"):
        call({"fidelity": good}, *told, other)


SLOW = """
import os, pathlib, time
import pytest

@pytest.mark.gpu
def test_slow():
    pathlib.Path("pid").write_text(str(os.getpid()))
    time.sleep(600)
"""


def test_sigterm_ends_the_suite_s_processes(tmp_path, monkeypatch):
    """As `timeout` sends it, to a group that pytest is not in."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_slow.py").write_text(SLOW)
    run = partial(suite.run_group, "test_slow.py", records.Clock(0.5), tmp_path)
    monkeypatch.setitem(gpu.PARTS, "tests", lambda _context: [Item("x", run)])
    command = ["gpu.py", "--device", "cpu", "--quick", "--parts", "tests", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(gpu, "prepare", lambda threads: None)  # of this process
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    pid = tmp_path / "pid"

    def send():
        while not (pid.is_file() and pid.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # it would end this process
    try:
        threading.Thread(target=send, daemon=True).start()
        with pytest.raises(SystemExit) as ended:
            gpu.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_arguments_are_checked(capsys):
    with pytest.raises(argparse.ArgumentTypeError, match="kernel is not a part; choose from tests"):
        gpu.names("layer,kernel")
    assert gpu.names("step,kernels") == ["kernels", "step"]
    taken = gpu.arguments(["--device", "cpu", "--schemes", "bf16, metis"])
    assert (taken.minutes, taken.schemes) == (40, ("bf16", "metis"))
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            gpu.arguments([])
        assert "add --device cpu --quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schemes", "bf16, metsi"], "metsi is not a scheme; choose from"),
        (["--model", "x"], "--model and --text belong together"),
        (["--model", "nope", "--text", "nope.txt"], "--model nope is not a directory"),
        (["--model", ".", "--text", "nope.txt"], "--text nope.txt is not a file"),
        (["--data", "nope"], "nope has no meta.json"),
        (["--device", "cuda:1"], "'cuda:1' is not visible, .* CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_what_no_part_would_find_is_refused_at_once(options, message, capsys):
    with pytest.raises(SystemExit):
        gpu.arguments(["--device", "cpu", *options])
    assert re.search(message, capsys.readouterr().err)
