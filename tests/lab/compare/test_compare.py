"""Comparisons as a user runs them: real processes, seeds, resuming, bad input."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from design import full_only
from rich.console import Console
from transformers import AutoModelForCausalLM

from metis_hf import to_dense
from metis_hf.cli.main import main
from metis_hf.lab.compare import plan as plans
from metis_hf.lab.compare import run as comparison
from metis_hf.lab.compare import timing
from metis_hf.lab.compare.data import load_data
from metis_hf.lab.compare.outputs import about_times
from metis_hf.lab.compare.plan import make_plan
from metis_hf.lab.compare.run import run_plan
from metis_hf.lab.compare.timing import load_times
from metis_hf.lab.run_records import read_run
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.shared.records import bf16_units

METIS_HF = [sys.executable, "-m", "metis_hf.cli.main"]
CONFIG = {
    "size": "tiny",
    "model": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    },
    "training": {"max_steps": 6, "save_steps": 2},
    "sequence_length": 32,
    "global_batch": 4,
    "eval_sequences": 16,
    "schemes": ["bf16", "nvfp4"],
    "seeds": [0, 1],
}


def run(*args, **kwargs):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    return subprocess.run(
        [*METIS_HF, "compare", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **kwargs,
    )


def write_config(folder, **changes):
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes))
    return path


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
def test_each_model_is_evaluated_without_its_quantizers_too(finished):
    """Beside a plain model with the same weights."""
    out, _, _ = finished
    settings = {"vocab_size": 300, "sequence_length": 32, "eval_sequences": 16, "seed": 0}
    data = out / "data"
    _, held_out, _ = load_data(data, None, **settings)
    ids = held_out["input_ids"][:]
    by_name = {r["scheme"]: r for r in record(out)["runs"] if r["seed"] == 0}
    for name, r in by_name.items():
        run_directory = out / "runs" / name / "seed-0"
        model = AutoModelForCausalLM.from_pretrained(run_directory / "model", dtype=torch.float32)
        with torch.no_grad(), torch.autocast("cpu", enabled=bf16_units(), dtype=torch.bfloat16):
            loss = to_dense(model)(input_ids=ids, labels=ids).loss.item()
        assert r["loss_dense"] == pytest.approx(loss, rel=1e-4)
        logged = read_run(run_directory)
        assert logged.series("eval_loss") == ([6], [r["loss"]])
        assert logged.series("eval_dense_loss") == ([6], [r["loss_dense"]])
    assert by_name["bf16"]["loss_dense"] == by_name["bf16"]["loss"]
    assert by_name["nvfp4"]["loss_dense"] != pytest.approx(by_name["nvfp4"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_finished_runs_are_kept_and_others_can_be_added(finished):
    out, config, _ = finished
    before = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/*/result.json")}
    assert len(before) == 4
    added = run("--config", config, "--schemes", "bf16,nvfp4,bf16-split", "--out", out)
    assert added.returncode == 0, added.stderr
    assert "2 runs of 6 steps" in added.stdout
    assert (
        before.items()
        <= {p: p.stat().st_mtime_ns for p in out.glob("runs/*/*/result.json")}.items()
    )
    assert "bf16-split" in (out / "table.md").read_text()
    assert "without quantizing anything (bf16-split)" in (out / "table.md").read_text()


@pytest.mark.slow
def test_times_measured_side_by_side(finished, tmp_path):
    """They stand in the table instead of those of the runs; losses stay."""
    out, config, _ = finished
    copied = shutil.copytree(out, tmp_path / "out")
    before = record(copied)
    done = run("--config", config, "--out", copied, "--times")
    assert done.returncode == 0, done.stderr
    times = json.loads((copied / "times.json").read_text())
    assert "unrecorded" not in times  # where no run plays CUDA graphs
    assert times["seconds"].keys() == {"bf16", "nvfp4"}
    after = record(copied)
    shown = {s["name"]: s["seconds_per_step"] for s in after["summaries"]}
    assert shown == times["seconds"]
    assert {r["seconds_per_step"] for r in after["runs"]} == set(times["seconds"].values())
    losses = {(r["scheme"], r["seed"]): r["loss"] for r in before["runs"]}  # of other schemes too
    assert all(r["loss"] == losses[r["scheme"], r["seed"]] for r in after["runs"])


@full_only
@pytest.mark.slow
def test_half_a_result_is_named_and_the_run_trained_again(finished):
    out, config, _ = finished
    path = out / "runs" / "nvfp4" / "seed-1" / "result.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    again = run("--config", config, "--out", out)
    assert again.returncode == 0, again.stderr
    assert "result.json is not a whole JSON file" in again.stdout
    assert "this run is trained again" in again.stdout
    assert json.loads(path.read_text())["loss"] == json.loads(whole)["loss"]


@full_only
@pytest.mark.slow
def test_precision_schedule_of_a_variant(finished, tmp_path):
    """Step for step the scheme until the switch; another switch is another variant."""
    out = shutil.copytree(finished[0], tmp_path / "out")
    variants = {"switched": {"scheme": "nvfp4", "precision_schedule": {"at": 3}}}
    config = write_config(tmp_path, schemes=None, variants=variants, seeds=[0])
    done = run("--config", config, "--out", out)
    assert done.returncode == 0, done.stderr
    found = record(out)
    assert found["variants"] == variants
    (switched,) = (r["curve"]["loss"] for r in found["runs"])
    result = json.loads((out / "runs/nvfp4/seed-0/result.json").read_text())
    quantized = [round(entry["loss"], 5) for entry in result["history"]]
    assert switched[:3] == quantized[:3]
    assert all(a != b for a, b in zip(switched[3:], quantized[3:], strict=True))
    saved = json.loads((out / "runs/switched/seed-0/model/config.json").read_text())
    assert saved["quantization_config"]["high_precision"] == ["forward"]
    variants["switched"]["precision_schedule"]["at"] = 4
    changed = write_config(tmp_path, schemes=None, variants=variants, seeds=[0])
    done = run("--config", changed, "--out", out)
    assert done.returncode == 2
    assert "another variant of the name 'switched'" in done.stderr


@pytest.mark.slow
def test_a_directory_of_another_comparison_is_refused(finished, tmp_path):
    out, _, _ = finished
    config = write_config(tmp_path, training={"max_steps": 7, "save_steps": 2})
    done = run("--config", config, "--out", out)
    assert done.returncode == 2
    assert "training.max_steps: 6 there, 7 now" in done.stderr
    assert "Traceback" not in done.stderr
    changed = write_config(tmp_path, schemes=None, variants={"nvfp4": {"scheme": "nvidia"}})
    done = run("--config", changed, "--out", out)
    assert done.returncode == 2
    assert "another variant of the name 'nvfp4'" in done.stderr


def with_data_of(finished, out):
    """A new directory that has the data already: making them is the longest part."""
    shutil.copytree(finished[0] / "data", out / "data")
    return out


@pytest.mark.slow
def test_a_failed_run_is_shown_and_the_others_go_on(finished, tmp_path):
    schedule = {"until": 4, "at": 3}  # leaves no step in four bits
    variants = {"broken": {"scheme": "nvfp4", "precision_schedule": schedule}}
    config = write_config(tmp_path, schemes=["bf16"], variants=variants, seeds=[0])
    out = with_data_of(finished, tmp_path / "out")
    done = run("--config", config, "--out", out, "--jobs", 1)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "1 of 2 runs failed; 1 are done" in done.stderr
    assert "broken, seed 0 (exit code 1)" in done.stderr
    assert "leave no step quantized" in done.stderr  # the end of its log says why
    assert "bf16" in (tmp_path / "out/table.md").read_text()  # what there is


@pytest.mark.slow
def test_several_processes_train_one_run(finished, tmp_path):
    """Two processes with half the batch each give the losses of one process."""
    whole, _, _ = finished
    config = write_config(tmp_path, schemes=["bf16"], seeds=[0])
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2"
    out = with_data_of(finished, tmp_path / "out")
    done = run("--config", config, "--out", out, "--launcher", launcher)
    assert done.returncode == 0, done.stderr
    spec = json.loads((out / "runs/bf16/seed-0/result.json").read_text())
    theirs = json.loads((whole / "runs/bf16/seed-0/result.json").read_text())
    assert len(spec["history"]) == 6
    # bf16 autocast: sums of two halves round otherwise than one sum.
    for mine, other in zip(spec["history"], theirs["history"]):
        assert mine["loss"] == pytest.approx(other["loss"], rel=5e-3)


def test_names_of_tasks_are_looked_up_before_anything_is_trained(monkeypatch):
    def look_up(names, directory):
        raise ValueError(f"unknown tasks {list(names)}")

    monkeypatch.setattr(plans, "plan_tasks", look_up)
    with pytest.raises(ValueError, match=r"unknown tasks \['booql'\]"):
        make_plan(tasks=["booql"])


def test_a_result_of_another_version_is_kept(tmp_path):
    plan = make_plan(**CONFIG | {"schemes": ["bf16"], "seeds": [0]})
    (tmp_path / "data").mkdir()  # would be made else
    path = tmp_path / "runs/bf16/seed-0/result.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"of_a_newer_version": 1}')
    with pytest.raises(ValueError, match=r"not a result of this version .*'of_a_newer_version'"):
        run_plan(plan, tmp_path)
    assert path.read_text() == '{"of_a_newer_version": 1}'


def test_half_a_result_is_named_and_removed(tmp_path, monkeypatch):
    plan = make_plan(**CONFIG | {"schemes": ["bf16"], "seeds": [0]})
    (tmp_path / "data").mkdir()
    path = tmp_path / "runs/bf16/seed-0/result.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"scheme": ')
    trained = []
    monkeypatch.setattr(comparison, "_train_all", lambda runs, *_: trained.extend(runs) or [])
    said = io.StringIO()
    run_plan(plan, tmp_path, progress=TaskProgress(Console(file=said, width=400)))
    assert [run.name for run in trained] == ["bf16, seed 0"]
    assert "is not a whole JSON file" in said.getvalue()
    assert "this run is trained again" in said.getvalue()
    assert not path.exists()


def test_times_of_other_variants_are_not_mixed_in(tmp_path, monkeypatch):
    def planned(**fields):
        own = {"variants": {"own": {"scheme": "nvfp4", **fields}}, "schemes": ["bf16", "metis"]}
        return make_plan(**CONFIG | own)

    plan = planned()
    monkeypatch.setattr(timing, "_batches", lambda *_: [])
    monkeypatch.setattr(timing, "_step", lambda *_: lambda: None)
    measured = [variant for variant in plan.variants if variant.name != "metis"]
    seconds = timing.measure_times(replace(plan, variants=tuple(measured)), tmp_path)
    assert seconds.keys() == {"bf16", "own"}
    assert load_times(plan, tmp_path, {"bf16", "own"}) == seconds
    assert load_times(plan, tmp_path, {"bf16"}) == seconds
    assert load_times(plan, tmp_path, {"bf16", "metis"}) == {}
    assert about_times(tmp_path, seconds) == []
    (said,) = about_times(tmp_path, {})
    assert "times.json are of other code or variants; --times measures again" in said
    other = planned(forward_rounding="stochastic")
    assert load_times(other, tmp_path, {"bf16"}) == seconds
    assert load_times(other, tmp_path, {"bf16", "own"}) == {}
    monkeypatch.setattr(timing, "source_digests", lambda *_: {"own": "another file"})
    assert load_times(plan, tmp_path, {"bf16", "own"}) == {}
    monkeypatch.undo()
    monkeypatch.setattr(timing, "code_digest", lambda: "other code")
    assert load_times(plan, tmp_path, {"bf16", "own"}) == {}
    (tmp_path / "times.json").write_text('{"seconds": {"bf16": 1.0, "own": 2.0}}')  # as before
    assert load_times(plan, tmp_path, {"bf16", "own"}) == {}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--schemes", "metsi"], "scheme 'metsi' is not registered; did you mean 'metis'?"),
        (["--preset", "table9"], "preset 'table9' is not known; choose from main, ablations"),
        (["--size", "70b"], "size '70b' is not known; choose from tiny, 130m, 1b1, 8b"),
        (["--seeds", "0,one"], "--seeds 0,one: expected whole numbers"),
        (["--seeds", "0,0"], "seed 0 is given more than once"),
        (["--size", "130m"], "size 130m needs data"),
        (["--schemes", "bf16", "--jobs", "2", "--launcher", "accelerate launch"], "one run at a"),
        (["--data", "nowhere"], "nowhere has no meta.json"),
        (["--validation", "nowhere"], "/nowhere without data: the standard library's"),
        (["--jobs", "-1"], "jobs=-1; expected at least 1"),
        (["--jobs", "0"], "jobs=0; expected at least 1"),
        (["--tasks", "boolq", "--tasks-dir", "nowhere"], "/nowhere is not a directory"),
        (["--tasks", "boolq", "--tasks-dir", "."], "/boolq.jsonl is missing, the data of boolq"),
        (["--tasks", "mine", "--tasks-dir", "."], "/mine.yaml is missing: 'mine' is none of the"),
        (["--tasks", "boolq,boolq"], "tasks named twice: boolq"),
    ],
)
def test_bad_input_is_one_line(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["metis-hf", "compare", "--out", str(tmp_path / "x"), *args])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()
