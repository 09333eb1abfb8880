"""`make gpu`: parts go on, fail, end in time and say why."""

from __future__ import annotations

import json
import math

import gpu
import pytest
import report
import torch
from conftest import llama
from forked import python
from on_gpu import record as records
from on_gpu.record import Clock, CutOff, Entry, Item, OutOfTime, Record, Skipped
from paths import ROOT

from benchmarks.gpu_records import FACTS, EndsAfter, measure


def two_items(calls: list[str]):
    def part(_context):
        for key in ("first", "second"):
            yield Item(key, lambda key=key: calls.append(key) or {"value": key})

    return part


def test_a_part_goes_on_where_the_minutes_ended():
    entry, calls = Entry(), []
    measure(two_items(calls), entry, EndsAfter(1))
    assert (entry.state, entry.reason) == (records.UNFINISHED, "no time was left for second")
    measure(two_items(calls), entry)
    assert (entry.state, entry.reason, calls) == (records.DONE, "", ["first", "second"])
    assert list(entry.items) == list(entry.seconds) == ["first", "second"]


def test_what_a_part_has_no_more_is_dropped_when_it_has_run_to_its_end():
    """Results and errors of an item that was renamed: they would stand beside the new ones."""
    entry, calls = Entry(), []
    entry.items, entry.seconds = {"old": {"value": 1}}, {"old": 1.0}
    entry.errors, entry.commits = {"tests/old.py": "1 failed"}, {"old": "abc"}
    measure(two_items(calls), entry, EndsAfter(1))
    assert "old" in entry.items
    measure(two_items(calls), entry)
    assert (entry.state, entry.errors) == (records.DONE, {})
    assert set(entry.items) == set(entry.seconds) == {"first", "second"}
    assert "old" not in entry.commits


def test_an_item_that_the_minutes_end_is_not_failed():
    """What is known to take longer than is left does not begin."""

    def ended():
        raise OutOfTime("3 of 4 steps are done")

    entry = Entry()
    measure(lambda _: [Item("long", lambda: 1 / 0, seconds=61.0)], entry, Clock(1))
    assert (entry.state, entry.errors) == (records.UNFINISHED, {})
    measure(lambda _: [Item("run", ended), Item("next", dict)], entry)
    assert (entry.state, entry.reason) == (records.UNFINISHED, "run: 3 of 4 steps are done")
    assert (entry.items, entry.errors) == ({}, {})


def test_what_fails_is_recorded_and_the_others_go_on():
    broken = [True]

    def fails():
        if broken[0]:
            raise RuntimeError("no such kernel")
        return {"value": 1}

    def part(_context):
        return [Item("first", fails), Item("second", dict)]

    entry = Entry()
    said = measure(part, entry)
    assert entry.state == records.FAILED
    assert entry.errors["first"].endswith("RuntimeError: no such kernel")
    assert "in fails" in entry.errors["first"]  # where it happened
    assert list(entry.items) == ["second"]
    assert any("FAILED: RuntimeError: no such kernel" in line for line in said)
    broken[0] = False
    measure(part, entry)
    assert (entry.state, entry.errors, entry.reason) == (records.DONE, {}, "")


def test_a_part_that_fails_outside_of_its_items_drops_none():
    def part(_context):
        yield Item("first", dict)
        import a_package_that_nobody_has  # noqa: F401

    entry = Entry(items={"old": {"value": 1}})
    measure(part, entry)
    assert entry.state == records.FAILED
    assert "No module named 'a_package_that_nobody_has'" in entry.errors[records.ITSELF]
    assert list(entry.items) == ["old", "first"]


def test_what_showed_something_wrong_is_measured_again_and_kept_until_then():
    found = {records.FAILURES: ["3 of normal"]}
    entry = Entry()
    measure(lambda _: [Item("bits", lambda: found)], entry)
    assert (entry.state, entry.errors) == (records.FAILED, {"bits": "3 of normal"})

    def ended():
        raise OutOfTime("not yet")

    measure(lambda _: [Item("bits", ended)], entry)
    assert (entry.state, entry.items, entry.errors) == (
        records.FAILED, {"bits": found}, {"bits": "3 of normal"},
    )  # fmt: skip
    measure(lambda _: [Item("bits", lambda: {"rows": []})], entry)
    assert (entry.state, entry.items, entry.errors) == (records.DONE, {"bits": {"rows": []}}, {})
    entry.errors["bits"] = "x"
    measure(lambda _: [Item("bits", lambda: 1 / 0)], entry)
    assert (entry.state, entry.items) == (records.FAILED, {})


def test_what_begins_from_zero_and_had_a_whole_call_has_failed():
    def cut():
        raise CutOff("it had not ended after 9 s")

    entry, clock = Entry(), Clock(9)
    measure(lambda _: [Item("short", dict), Item("long", cut)], entry, clock)
    assert (entry.state, entry.errors) == (records.UNFINISHED, {})  # the next call has more time
    measure(lambda _: [Item("short", dict), Item("long", cut)], entry, Clock(9))
    assert entry.state == records.FAILED
    assert entry.errors["long"].endswith("after 9 s; it needs more than 9 minutes in one call")


def test_too_little_memory_is_a_result_and_no_failure():
    def large():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. More text.")

    entry = Entry()
    measure(lambda _: [Item("large", large), Item("small", dict)], entry)
    assert (entry.state, list(entry.items)) == (records.DONE, ["large", "small"])
    assert entry.items["large"] == {records.DOES_NOT_FIT: "CUDA out of memory"}


def test_a_skipped_part_says_why_and_is_tried_again():
    def skipped(_context):
        raise Skipped("no tokens were given")

    entry = Entry()
    measure(skipped, entry)
    assert (entry.state, entry.reason) == (records.SKIPPED, "no tokens were given")
    measure(lambda _: [Item("first", dict)], entry)
    assert (entry.state, entry.reason) == (records.DONE, "")


def test_a_record_of_another_machine_is_refused(tmp_path):
    path = tmp_path / "gpu-x.json"
    first = Record(path, FACTS, gpu.machine.IDENTITY)
    first.part("kernels").items["bits"] = {"rows": []}
    first.write()
    same = Record(path, FACTS, gpu.machine.IDENTITY)
    assert same.part("kernels").items == {"bits": {"rows": []}}
    with pytest.raises(ValueError, match=r"torch '2\.8\.0', but this call has '2\.13\.0'"):
        Record(path, FACTS | {"torch": "2.13.0"}, gpu.machine.IDENTITY)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="not a complete record"):
        Record(path, FACTS, gpu.machine.IDENTITY)


# --- the report -----------------------------------------------------------------------------------


def test_targets_for_a_gpu_are_read_from_its_record(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.gpu_layer_ratio("nvfp4")() is None
    assert "No GPU" in report.gpus_markdown()
    row = {"name": "nvfp4", "kernels": "triton", "dtype": "bfloat16",
           "shape": [16384, 4096, 4096], "ratio": 1.5}  # fmt: skip
    record = Record(tmp_path / "gpu-h.json", FACTS | {"gpu": "NVIDIA H200"}, ())
    items = {"16384": {"rows": [row | {"ratio": 9.0}]}, "16384, triton": {"rows": [row]}}
    record.parts["layer"] = Entry(records.DONE, items=items)  # the latest layer decides
    record.parts["native"] = Entry(records.SKIPPED, "no FP4 units")
    record.write()
    assert report.gpu_layer_ratio("nvfp4")() == (1.5, None)
    assert report.gpu_layer_ratio("metis")() is None
    shown = report.gpus_markdown()
    others = "tests, kernels, large, step, fidelity, compare, scale: to come; native: skipped"
    assert f"| [NVIDIA H200](gpu-h.md) | 2.8.0 | layer | {others} |" in shown


# --- everything -----------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path):
    """A tiny model with its tokenizer, a text, and chunked tokens: options of the command."""
    import numpy as np

    from metis_hf.data.chunked import META, write_shards
    from metis_hf.data.corpus import stdlib_documents, train_tokenizer

    documents = stdlib_documents()[:20]
    tokenizer = train_tokenizer(documents, 512, max_chars=100_000)
    llama(1, vocab_size=512, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(documents[0].text[:20_000])
    data, tokens = tmp_path / "data", np.arange(64 * 32, dtype=np.int32) % 512
    sequences = write_shards(data, lambda _: tokens, [len(tokens)], 32, 64, lambda _: None)
    meta = {"tokenizer": "x", "seq_len": 32, "num_sequences": sequences, "num_tokens": len(tokens),
            "vocab_size": 512, "eos_token_id": 0}  # fmt: skip
    (data / META).write_text(json.dumps(meta))
    options = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--data", data]
    return list(map(str, options))


@pytest.mark.slow
def test_every_part_runs_on_the_cpu(inputs, tmp_path, monkeypatch):
    """As on a machine with a GPU, only smaller; the second call has nothing left to do."""
    monkeypatch.setenv("METIS_KERNELS", "reference")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [ROOT / "benchmarks" / "gpu.py", "--device", "cpu", "--quick", "--out", tmp_path]
    command += ["--work", tmp_path / "work", *inputs, "--schemes", "bf16,metis"]
    python(*command)
    found = json.loads((tmp_path / "gpu-cpu.json").read_text())
    states = {name: entry["state"] for name, entry in found["parts"].items()}
    measured = ["kernels", "layer", "large", "step", "fidelity", "compare", "scale"]
    assert states == {
        **dict.fromkeys(measured, records.DONE), "tests": records.SKIPPED,
        "native": records.SKIPPED,
    }  # fmt: skip
    reason = found["parts"]["tests"]["reason"]
    assert int(reason.split()[0]) >= 2
    assert "need a CUDA device" in reason
    assert found["machine"]["allow_tf32"] is False
    compared = found["parts"]["compare"]["items"]
    assert compared["plan"]["steps"] == 6
    for scheme in ("bf16", "metis"):
        assert [step for step, _ in compared[scheme]["curve"]] == [1, 2, 3, 4, 5, 6]
        # Six small steps: about what a guess among all tokens of the model has.
        assert compared[scheme]["loss"] == pytest.approx(math.log(50257), abs=0.5)
    assert "| metis |" in (tmp_path / "gpu-cpu.md").read_text()
    again = python(*command, "--parts", "kernels,compare").splitlines()
    assert again[:2] == ["kernels: done", "compare: done"]
