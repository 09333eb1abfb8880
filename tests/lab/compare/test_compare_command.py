"""Comparisons as a user runs them: real processes, seeds, added schemes, times."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from design import full_only
from paths import ROOT
from transformers import AutoModelForCausalLM

from lab.compare.comparing import CONFIG, run, write_config
from metis_hf import to_dense
from metis_hf.cli.demo import QUICK_TIME
from metis_hf.lab.compare import plan as plans
from metis_hf.lab.compare import step_times
from metis_hf.lab.compare.data import load_data
from metis_hf.lab.compare.plan import make_plan
from metis_hf.lab.compare.step_times import load_times
from metis_hf.shared.records import bf16_units


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(directory, config, printed text) of two schemes with two seeds."""
    folder = tmp_path_factory.mktemp("compare")
    config = write_config(folder)
    done = run("--config", config, "--out", folder / "out", "--jobs", 2)
    assert done.returncode == 0, done.stderr
    return folder / "out", config, done.stdout


def record(out):
    return json.loads((out / "compare.json").read_text())


@pytest.mark.slow
def test_outputs_hold_what_was_trained(finished):
    out, _, printed = finished
    found = record(out)
    assert [(r["scheme"], r["seed"]) for r in found["runs"]] == [
        ("bf16", 0), ("nvfp4", 0), ("bf16", 1), ("nvfp4", 1)
    ]  # fmt: skip
    assert found["tokens"] == 6 * 4 * 32
    assert found["jobs"] == 2
    by_run = {(r["scheme"], r["seed"]): r for r in found["runs"]}
    for r in found["runs"]:
        assert r["curve"]["step"] == list(range(1, 7))
        assert math.isfinite(r["loss"])
        assert r["config"]["seed"] == r["seed"]
        assert r["peak_memory"] > 0
        # An untrained model of 300 tokens: the loss is near ln 300 = 5.7 and falls.
        assert r["curve"]["loss"][0] == pytest.approx(math.log(300), abs=0.3)
        assert r["curve"]["loss"][-1] < r["curve"]["loss"][0]
    # One seed, one initialization and one order of data; the next seed has others.
    first = {key: r["curve"]["loss"][0] for key, r in by_run.items()}
    assert first["nvfp4", 0] == pytest.approx(first["bf16", 0], rel=0.02)
    assert first["bf16", 0] != first["bf16", 1]
    (summary,) = (s for s in found["summaries"] if s["name"] == "nvfp4")
    gaps = [100 * (by_run["nvfp4", s]["loss"] / by_run["bf16", s]["loss"] - 1) for s in (0, 1)]
    assert summary["gap"]["mean"] == pytest.approx(sum(gaps) / 2)
    for name in ("table.md", "table.tex", "table.csv"):
        assert "nvfp4" in (out / name).read_text()
    for name in ("loss.png", "gap.png", "cost.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert f"{summary['mean']:.4f}" in printed
    assert "seed 1: held-out loss" in printed


@pytest.mark.slow
def test_models_are_hugging_face_directories_evaluated_without_quantizers_too(finished):
    """Beside a plain model with the same weights."""
    out, _, _ = finished
    _, held_out, _ = load_data(out / "data", None, make_plan(**CONFIG).experiment, 16)
    ids = held_out["input_ids"][:]
    by_name = {r["scheme"]: r for r in record(out)["runs"] if r["seed"] == 0}
    for name, r in by_name.items():
        folder = out / "runs" / name / "seed-0"
        assert not list(folder.glob("checkpoint-*"))
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        with torch.no_grad(), torch.autocast("cpu", enabled=bf16_units(), dtype=torch.bfloat16):
            loss = to_dense(model)(input_ids=ids, labels=ids).loss.item()
        assert r["loss_dense"] == pytest.approx(loss, rel=1e-4)
    assert by_name["bf16"]["loss_dense"] == by_name["bf16"]["loss"]
    assert by_name["nvfp4"]["loss_dense"] != pytest.approx(by_name["nvfp4"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_schemes_are_added_and_steps_timed_side_by_side(finished, tmp_path):
    """Finished runs stay; the table shows the times that were measured side by side."""
    out, config, _ = finished
    copied = shutil.copytree(out, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in copied.glob("runs/*/*/result.json")}
    done = run("--config", config, "--schemes", "bf16,nvfp4,bf16-split", "--times", "--out", copied)
    assert done.returncode == 0, done.stderr
    assert "2 runs of 6 steps" in done.stdout
    after = {p: p.stat().st_mtime_ns for p in copied.glob("runs/*/*/result.json")}
    assert len(before) == 4
    assert before.items() <= after.items()
    assert "without quantizing anything (bf16-split)" in (copied / "table.md").read_text()
    times = json.loads((copied / "times.json").read_text())
    assert "unrecorded" not in times  # where no run plays CUDA graphs
    shown = {s["name"]: s["seconds_per_step"] for s in record(copied)["summaries"]}
    assert shown == times["seconds"]
    assert shown.keys() == {"bf16", "nvfp4", "bf16-split"}


@pytest.mark.slow
@full_only
def test_several_processes_train_one_run(finished, tmp_path):
    """Two processes with half the batch each give the losses of one process."""
    whole, _, _ = finished
    config = write_config(tmp_path, schemes=["bf16"], seeds=[0])
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2"
    out = tmp_path / "out"
    shutil.copytree(whole / "data", out / "data")
    done = run("--config", config, "--out", out, "--launcher", launcher)
    assert done.returncode == 0, done.stderr
    mine, theirs = (
        json.loads((folder / "runs/bf16/seed-0/result.json").read_text()) for folder in (out, whole)
    )
    assert len(mine["history"]) == 6
    # bf16 autocast: sums of two halves round otherwise than one sum.
    for one, other in zip(mine["history"], theirs["history"]):
        assert one["loss"] == pytest.approx(other["loss"], rel=5e-3)


def test_names_of_tasks_are_looked_up_before_anything_is_trained(monkeypatch):
    def look_up(tasks, tasks_dir):
        raise ValueError(f"unknown tasks {[*tasks]}")

    monkeypatch.setattr(plans, "plan_tasks", look_up)
    with pytest.raises(ValueError, match=r"unknown tasks \['booql'\]"):
        make_plan(tasks=["booql"])


def test_times_of_other_variants_are_not_mixed_in(tmp_path, monkeypatch):
    def planned(**fields):
        own = {"variants": {"own": {"scheme": "nvfp4", **fields}}, "schemes": ["bf16", "metis"]}
        return make_plan(**CONFIG | own)

    plan, path = planned(), tmp_path / "times.json"
    assert load_times(plan, path, {"bf16", "own"}) == ({}, [])
    monkeypatch.setattr(step_times, "batches_of_a_step", lambda *_: [])
    monkeypatch.setattr(step_times, "step_of", lambda *_: lambda: None)
    measured = [variant for variant in plan.variants if variant.name != "metis"]
    only = replace(plan, variants=tuple(measured))
    seconds = step_times.measure_times(only, tmp_path / "data", path)
    assert seconds.keys() == {"bf16", "own"}
    assert load_times(plan, path, {"bf16", "own"}) == (seconds, [])
    assert load_times(plan, path, {"bf16"}) == (seconds, [])
    none, (said,) = load_times(plan, path, {"bf16", "metis"})
    assert none == {}
    assert "times.json come from other code or variants; --times measures them again" in said
    other = planned(forward_rounding="stochastic")
    assert load_times(other, path, {"bf16"}) == (seconds, [])
    assert load_times(other, path, {"bf16", "own"}) == ({}, [said])
    monkeypatch.setattr(step_times, "task_key", lambda *_: "of other code")
    assert load_times(plan, path, {"bf16", "own"}) == ({}, [said])
    path.write_text('{"seconds": {"bf16": 1.0, "own": 2.0}}')  # as before
    assert load_times(plan, path, {"bf16", "own"}) == ({}, [said])


def test_the_documentation_says_how_long_the_quick_demo_takes():
    assert QUICK_TIME in " ".join((ROOT / "docs/quickstart.md").read_text().split())
