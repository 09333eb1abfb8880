"""The page of `make gpu`: it tells all of a record."""

from __future__ import annotations

import json
import re
import subprocess

import gpu
import layer
import pytest
import timing
import torch
from on_gpu import machine
from on_gpu import record as records
from on_gpu.page import page
from on_gpu.record import Entry, Item, Record

from benchmarks.gpu_records import FACTS, measure


def test_the_page_tells_of_every_part(tmp_path):
    record = Record(tmp_path / "r.json", FACTS | {"allow_tf32": False}, ())
    record.begin_call(9, "abc1234")
    record.parts = {
        "tests": Entry(records.DONE, items={"a.py::T": {"passed": 2, "failed": 0, "skipped": 1}}),
        "kernels": Entry(records.FAILED, "1 failed", errors={"bits": "ZeroDivisionError: x"}),
        "layer": Entry(records.DONE, items={"9 x 9": {records.DOES_NOT_FIT: "CUDA out of memory"}}),
        "fidelity": Entry(records.SKIPPED, "no model was given: a | b"),
        "native": Entry(
            items={"s": {"rows": [], "without": [{"name": "n", "reason": "it has no codes"}]}}
        ),
    }
    text = page(record, "x", list(gpu.PARTS))
    assert "| a.py::T | 2 | 0 | 1 |  |" in text
    assert "Failed: bits\n\n```text\nZeroDivisionError: x\n```" in text
    assert "- 9 x 9: memory is too small (CUDA out of memory)" in text
    assert "| fidelity | skipped |  |  | no model was given: a \\| b |" in text
    assert "- s: n: it has no codes" in text
    assert "| step | to come |  |  |  |" in text
    assert "| torch.backends.cuda.matmul.allow_tf32 | False |" in text
    assert "1 calls, of commit abc1234." in text


def test_a_checkout_with_changes_is_no_commit(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    assert machine.commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "One")
    git("tag", "-a", "v1", "-m", "one")
    name = machine.commit(tmp_path)
    assert name is not None
    assert re.fullmatch("[0-9a-f]{7,}", name)
    (tmp_path / "file").write_text("two")
    assert machine.commit(tmp_path) == f"{name}-dirty"


def test_results_of_several_commits_are_named(tmp_path):
    record = Record(tmp_path / "r.json", FACTS, ())
    entry = record.part("layer")
    for commit, count in (("abc1234", 1), ("def5678", 3)):
        items = [Item(f"9 x {n}", lambda: {"rows": []}) for n in range(count)]
        measure(lambda _, items=items: items, entry, commit=commit)
        several = "Results of several commits:\n\n- abc1234: 9 x 0\n- def5678: 9 x 1; 9 x 2\n"
        text = page(record, "x", ["layer"])
        assert (several in text) == (count == 3)
        assert "| layer | done |  | abc1234" in text
    entry.commits["9 x 0"] = None
    assert "| layer | done |  | not known, def5678 |" in page(record, "x", ["layer"])


def test_calls_on_other_machines_are_named(tmp_path):
    """Those of an older record, which holds the machine of its last call alone, as not known."""
    path = tmp_path / "r.json"
    facts = FACTS | {"driver": "580.1", "python": "3.12.3"}
    calls = [{"began": str(n), "minutes": 9, "commit": "abc1234"} for n in range(2)]
    path.write_text(json.dumps({"machine": facts, "calls": calls, "parts": {}}))
    record = Record(path, facts | {"driver": "590.2"}, gpu.machine.IDENTITY)
    record.begin_call(9, "abc1234")
    record.write()
    record = Record(path, facts | {"driver": "590.2"}, gpu.machine.IDENTITY)
    text = page(record, "x", [])
    assert "| driver | 580.1 and 590.2 |" in text
    assert "| python | 3.12.3 |" in text
    assert "3 calls, of commit abc1234. The processor, driver and versions" in text
    assert "of 1 of them are not known" in text


def test_a_layer_that_cannot_be_recorded_says_why(tmp_path, monkeypatch):
    """If it is the one that others are compared with, they are not tried."""

    def refuse(step):
        if step is refused:
            raise timing.NotRecorded("OutOfMemoryError: CUDA out of memory.\nMore | text.")
        return step

    monkeypatch.setattr(layer, "recorded", refuse)
    steps = [lambda: None, lambda: None]
    refused = steps[1]
    row = {"dtype": "bfloat16", "kernels": "triton", "shape": [9, 9, 9], "rounds": 7, "ms": 1.0,
           "quartiles_ms": [1.0, 1.0], "ratio": 1.0, "quartiles_ratio": [1.0, 1.0]}  # fmt: skip
    rows = [row | {"name": name} for name in ("nn.Linear", "metis")]
    layer.add_recorded(rows, steps, 2, 0.0, torch.device("cpu"))
    assert ["recorded_ms" in row for row in rows] == [True, False]
    record = Record(tmp_path / "r.json", FACTS, ())
    record.parts = {"layer": Entry(records.DONE, items={"9 x 9": {"rows": rows}})}
    note = "OutOfMemoryError: CUDA out of memory. More \\| text."
    told = f"Not measured:\n\n- 9 x 9: metis, bfloat16, triton, in a CUDA graph: {note}\n"
    assert told in page(record, "x", ["layer"])
    rows = [row | {"name": name} for name in ("nn.Linear", "metis")]
    refused = steps[0]
    layer.add_recorded(rows, steps, 2, 0.0, torch.device("cpu"))
    assert rows[1]["recorded_note"] == "not tried, since nn.Linear was not recorded"


def test_a_record_in_git_is_read_and_its_page_is_what_it_gives():
    """What is measured on it goes on, and no column of the page has changed since."""
    path = gpu.RESULTS / "gpu-nvidia-h200.json"
    machine = json.loads(path.read_text())["machine"]
    record = Record(path, machine, gpu.machine.IDENTITY)
    drawn = page(record, "nvidia-h200", list(gpu.PARTS))
    assert drawn == (gpu.RESULTS.parent / "gpu-nvidia-h200.md").read_text()
    with pytest.raises(ValueError, match=r"triton '3\.6\.0', but this call has '3\.7\.0'"):
        Record(path, machine | {"triton": "3.7.0"}, gpu.machine.IDENTITY)


def test_the_comparison_is_read_off_its_plan(tmp_path):
    record = Record(tmp_path / "r.json", FACTS, ())
    plan = {"parameters": 124e6, "steps": 400, "tokens_per_step": 16384, "bound_by": "the data",
            "precision": "bf16"}  # fmt: skip
    rows = {
        name: {"scheme": name, "loss": loss, "seconds_per_step": seconds, "peak_bytes": 2**21}
        for name, loss, seconds in (("bf16", 4.0, 0.1), ("metis", 4.1, 0.25))
    }
    record.parts = {"compare": Entry(records.DONE, items={"plan": plan, **rows})}
    text = page(record, "x", ["compare"])
    assert "| metis | 4.1000 | +2.50 | 250 | 2.50 | 2 |" in text
