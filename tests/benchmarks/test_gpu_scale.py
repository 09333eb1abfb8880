"""The part `scale` of `make gpu`: order of worth, memory, time, and one table of many records."""

from __future__ import annotations

import json
from pathlib import Path

import gpu
import numpy as np
import pytest
import scale_table
import torch
from forked import python
from on_gpu import scale
from on_gpu.context import Context
from on_gpu.record import Clock, Entry
from paths import ROOT

from benchmarks.gpu_records import EndsAfter, measure
from metis_hf.data.shards import Streams
from metis_hf.lab.store import numerics_digest

# The packages that a machine with a GPU may not have.
MISSING = [
    "datasets", "lm_eval", "matplotlib", "pandas", "peft", "pyarrow", "rich", "scipy", "sklearn",
    "typer",
]  # fmt: skip


def text(tokens: int = 4096, name: str = "prose") -> scale.Text:
    ids = np.random.default_rng(0).integers(0, 512, tokens).astype(np.uint16)
    return scale.Text(name, Streams(ids, ids[:512]), 512, "0123456789abcdef")


def context(work: Path, entry: Entry, clock: Clock | None = None, **changes) -> Context:
    options = {"quick": True, "tokens": text(), **changes}
    clock = clock or Clock(None)
    return Context(torch.device("cpu"), clock=clock, entry=lambda _: entry, work=work, **options)


def row(scheme: str = "bf16", seed: int = 0, **changes) -> dict:
    """A unit's result, as the record has it."""
    return {
        "preset": "30m", "scheme": scheme, "seed": seed, "config": {}, "loss": 4.0 + seed / 10,
        "loss_dense": 4.0, "tasks": {}, "seconds_per_step": 0.1, "peak_memory": 10**9,
        "parameters": 51 * 10**6, "precision_schedule": None, "steps": 700, "tokens": 22_937_600,
        "machine": {"device": "A GPU", "precision": "bf16"}, "device_batch": 64, "recorded": True,
        "code": {"sha256": "aaaa", "commit": "abc1234"}, "text": "prose", "tokens_digest": "t",
        "settings": "s", "curve": {"step": [1], "loss": [9.0]}, **changes,
    }  # fmt: skip


def test_units_come_in_the_order_of_their_worth():
    keys = [unit.key for unit in scale.units()]
    assert len(keys) == len(set(keys)) == 13 * 3 + 3
    assert keys[:5] == [
        *(f"30m, {name}, seed 0" for name in ("bf16", "metis", "nvidia", "nvfp4-rne")),
        "30m, bf16, seed 1",
    ]
    assert keys[12:21] == [
        "30m, quartet2, seed 0", "30m, four-over-six, seed 0", "30m, averis, seed 0",
        "30m, metis rank 1.5%, seed 0", "30m, metis rank 18%, seed 0",
        "30m, metis-released, seed 0", "30m, metis-released in bf16, seed 0",
        "30m, metis subspaces of 8 steps, seed 0", "30m, metis-paper, seed 0",
    ]  # fmt: skip
    assert keys[21:24] == [f"130m, {name}, seed 0" for name in ("bf16", "metis", "nvidia")]


def test_micro_batches_get_smaller_until_they_fit_and_stay_so(monkeypatch, tmp_path):
    tried: list[tuple[str, int]] = []

    def train_unit(unit, size, context, text, batch, run):
        tried.append((unit.key, batch))
        if batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return row(unit.variant.name, unit.seed, device_batch=batch)

    monkeypatch.setattr(scale, "train_unit", train_unit)
    entry = Entry()
    first, second = scale.units(quick=True)[:2]
    made = context(tmp_path, entry)
    entry.items[first.key] = scale.measure(first, made, text())
    scale.measure(second, made, text())
    assert tried == [(first.key, 4), (first.key, 2), (first.key, 1), (second.key, 1)]


def test_a_unit_that_does_not_fit_gives_way_to_one_that_does(monkeypatch, tmp_path):
    """And none begins that the minutes have no room for."""
    keys = [unit.key for unit in scale.units(quick=True)]
    entry = Entry(items={"30m, bf16, seed 0": row(), "30m, metis, seed 0": row("metis")})
    entry.seconds = {"30m, bf16, seed 0": 1.0, "30m, metis, seed 0": 500.0}
    clock = Clock(10)
    monkeypatch.setattr(Clock, "left", lambda _: 400.0)
    quick = lambda unit, *_: row(unit.variant.name, unit.seed, preset=unit.preset)  # noqa: E731
    monkeypatch.setattr(scale, "measure", quick)
    made = context(tmp_path, entry, clock)
    measure(lambda _: scale.scale(made), entry, clock)
    assert "30m, bf16, seed 1" in entry.items  # its cost is known
    assert "30m, metis, seed 1" not in entry.items
    assert entry.reason == "no time was left for 30m, nvidia, seed 0"
    assert set(entry.items) <= set(keys)


def test_too_little_text_is_said_in_numbers(tmp_path):
    for name, count in (("train.txt", 30), ("val.txt", 4000)):
        (tmp_path / name).write_text("word " * count)
    with pytest.raises(ValueError, match=r"has 32 training tokens, but 4 steps need 512; give"):
        scale.open_text(tmp_path, None, quick=True, work=tmp_path / "work")
    unit = next(unit for unit in scale.units() if unit.preset == "130m")
    found = scale.measure(unit, context(tmp_path, Entry(), quick=False), text())
    assert found == {"reason": "prose has 4,096 training tokens, but this run needs 32,768,000"}


def test_records_of_other_numerics_make_no_table(tmp_path):
    def record(name: str, **units) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"parts": {"scale": {"items": units}}}))
        return path

    one = record("one", a=row(), b=row("metis", loss=4.04))
    two = record("two", a=row(loss=9.0), c=row(seed=1, code={"sha256": "aaaa", "commit": "def"}))
    rows = scale_table.joined([one, two])
    assert (list(rows), rows["a"]["loss"]) == (["a", "b", "c"], 4.0)
    found = scale_table.markdown(rows)
    assert "| metis | **4.0400** | +1.00 |" in found
    assert "on A GPU in bf16; commit abc1234 and def, numerics aaaa" in found
    changes = {
        "numerics": {"code": {"sha256": "bbbb", "commit": "x"}},
        "tokens": {"tokens_digest": "other"},
        "settings": {"settings": "other"},
    }
    for what, change in changes.items():
        other = record("other", d=row("nvidia", **change))
        with pytest.raises(
            ValueError, match=rf"other\.json has runs of 30m with different {what}.*one\.json"
        ):
            scale_table.joined([one, other])
    with pytest.raises(ValueError, match="no run of the part scale"):
        scale_table.joined([record("empty")])


def test_a_page_shows_the_table_and_the_curves(tmp_path):
    (tmp_path / "README.md").write_text("# Runs\n\n<!-- scale 30m -->\nold\n<!-- end -->\nafter\n")
    record = tmp_path / "one.json"
    units = {"a": row(), "b": row("metis", loss=4.04)}
    record.write_text(json.dumps({"parts": {"scale": {"items": units}}}))
    python(ROOT / "benchmarks" / "scale_table.py", record, "--out", tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| metis | 4.0400 | +1.00 |" in page
    assert "old" not in page
    assert page.endswith("<!-- end -->\nafter\n")
    assert (tmp_path / "30m.png").stat().st_size > 10_000
    assert not (tmp_path / "scale.json").exists()  # of one record it says the same


def test_the_table_has_intervals_where_seeds_allow(tmp_path):
    rows = {}
    for seed in range(3):
        rows[f"b{seed}"] = row(seed=seed, numerics="a")
        above = 1.01 + 0.001 * seed
        rows[f"n{seed}"] = row("nvidia", seed, loss=(4.0 + seed / 10) * above, numerics="a")
    # Of 1.0, 1.1 and 1.2 %: the t quantile of two degrees of freedom is 4.303.
    assert "+1.10 ± 0.25" in scale_table.markdown(rows)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """A function that runs the command with units that cost nothing: what it said."""
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "benchmarks" / "results")
    quick = lambda unit, *_: row(unit.variant.name, unit.seed, preset=unit.preset)  # noqa: E731
    monkeypatch.setattr(scale, "measure", quick)

    def run(*options: str) -> list[str]:
        said: list[str] = []
        given = ["--device", "cpu", "--quick", "--parts", "scale", "--out", str(tmp_path)]
        args = gpu.arguments([*given, "--work", str(tmp_path / "work"), *options])
        gpu.run(args, gpu.PARTS, said.append)
        return said

    return run


def test_a_record_of_other_numerics_or_text_is_kept_and_refused(call, tmp_path, monkeypatch):
    folder = tmp_path / "prose"
    folder.mkdir()
    for name in ("train.txt", "val.txt"):
        (folder / name).write_text("".join(f"{number} sheep\n" for number in range(1500)))
    said = call("--text", str(folder))
    assert "scale: done" in said
    assert call("--text", str(folder))[0] == "scale: done"  # nothing is measured again
    kept = (tmp_path / "gpu-cpu.json").read_text()
    monkeypatch.setattr(scale, "numerics_digest", lambda: "other")
    with pytest.raises(
        ValueError, match=rf"results of scale with text 'prose'.*{numerics_digest()}"
    ):
        call("--text", str(folder))
    monkeypatch.undo()
    (folder / "train.txt").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=r"train\.txt is not UTF-8: byte 0 is 0xe9"):
        call("--text", str(folder))
    assert (tmp_path / "gpu-cpu.json").read_text() == kept


QUICK = """
import runpy, sys
sys.modules.update(dict.fromkeys({missing}))
sys.argv = ["gpu.py", "--device", "cpu", "--quick", "--parts", "scale", *sys.argv[1:]]
sys.path.insert(0, {folder!r})
runpy.run_path({folder!r} + "/gpu.py", run_name="__main__")
"""


@pytest.mark.slow
def test_every_unit_trains_without_the_packages_that_may_be_missing(tmp_path, monkeypatch):
    """The second call, of the same command, has nothing left to do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = QUICK.format(missing=MISSING, folder=str(ROOT / "benchmarks"))
    command = ["-c", script, "--out", tmp_path, "--work", tmp_path / "work"]
    python(*command)
    entry = json.loads((tmp_path / "gpu-cpu.json").read_text())["parts"]["scale"]
    assert list(entry["items"]) == [unit.key for unit in scale.units(quick=True)]
    for found in entry["items"].values():
        # A few small steps: about what a guess among all tokens of the model has.
        assert found["loss"] == pytest.approx(np.log(512), abs=0.5)
        assert found["code"]["sha256"] == numerics_digest()
    page = (tmp_path / "gpu-cpu.md").read_text()
    assert "| metis subspaces of 8 steps |" in page
    assert "### 130m" in page
    assert python(*command).splitlines()[0] == "scale: done"


@pytest.mark.slow
def test_a_unit_that_the_minutes_end_keeps_the_others_and_goes_on(tmp_path):
    """From its checkpoint, to the same loss."""

    entry, clock = Entry(), EndsAfter(100)
    made = context(tmp_path / "work", entry, clock)
    unit = scale.units(quick=True)[1]
    whole = scale.measure(unit, context(tmp_path / "whole", Entry()), text())
    entry.items["30m, bf16, seed 0"] = kept = row(device_batch=4)
    clock.looks = 3
    measure(lambda _: scale.scale(made), entry, clock)
    assert not entry.errors
    assert (
        entry.reason
        == "30m, metis, seed 0: 2 of 4 steps are done; the next call continues from its checkpoint"
    )
    assert entry.items == {"30m, bf16, seed 0": kept}
    again = scale.measure(unit, context(tmp_path / "work", Entry()), text())
    assert again["loss"] == whole["loss"]
