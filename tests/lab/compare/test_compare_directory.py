"""A comparison's directory and machine: what it holds of begun runs, how many run side by side."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from lab.compare.test_compare import CONFIG
from lab.evaluate.eval_tools import DATA as EVAL_DATA
from metis_hf.cli.main import main
from metis_hf.lab.compare import outputs, timing
from metis_hf.lab.compare import run as comparison
from metis_hf.lab.compare.plan import make_plan
from metis_hf.lab.compare.results import SchemeResult, save_result
from metis_hf.lab.compare.run import _default_jobs, _slot_environment, jobs_of, run_plan
from metis_hf.lab.compare.runner import run_variant

MINE = {"mine": {"scheme": "nvfp4"}}


def plan(**options):
    return make_plan(**CONFIG | {"schemes": None, "variants": MINE, "seeds": [0]} | options)


@pytest.fixture
def out(tmp_path, monkeypatch):
    """The directory of comparisons whose runs end before they have trained anything."""
    monkeypatch.setattr(comparison, "_train_all", lambda *_: [])
    (tmp_path / "data").mkdir()  # would be made else
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [{"forward_rounding": "stochastic"}, {"precision_schedule": {"at": 3}}, {"scheme": "nvidia"}],
)
def test_a_half_trained_run_of_another_variant_is_refused(changes, out):
    run_plan(plan(), out)
    changed = plan(variants={"mine": MINE["mine"] | changes})
    run_plan(changed, out)  # nothing was trained
    (out / "runs/mine/seed-0/checkpoint-2").mkdir()
    run_plan(changed, out)
    with pytest.raises(ValueError, match="another variant of the name 'mine'; choose"):
        run_plan(plan(), out)


def test_checkpoints_that_a_finished_run_has_left_are_removed(out):
    asked = plan()
    (variant,), run = asked.variants, out / "runs/mine/seed-0"
    result = SchemeResult("mine", variant.metis_config(0).to_dict(), "", 1.0, {}, 0.1, [])
    (run / "checkpoint-4").mkdir(parents=True)
    save_result(run, result)
    assert run_plan(asked, out) == [result]
    assert [path.name for path in run.iterdir()] == ["result.json"]
    (run / "checkpoint-4").mkdir()
    assert run_variant(asked.experiment, variant, None, None, run, None) == result
    assert [path.name for path in run.iterdir()] == ["result.json"]


def test_a_record_says_how_many_ran_side_by_side(out):
    """Whatever is still to train when the command is repeated."""
    two = plan(seeds=[0, 1])
    run_plan(two, out, jobs=2)
    for seed in (0, 1):
        config = two.variants[0].metis_config(seed).to_dict()
        result = SchemeResult("mine", config, "", 1.0, {}, 0.1, [], seed=seed)
        save_result(out / f"runs/mine/seed-{seed}", result)
    more = plan(seeds=[0, 1], schemes=["bf16"])
    run_plan(more, out, jobs=1)
    assert (jobs_of(two, out), jobs_of(more, out)) == (2, 2)
    assert jobs_of(plan(variants={}, schemes=["bf16"]), out) == 1
    assert jobs_of(two, out / "nowhere") is None


def test_a_run_that_began_beside_others_is_no_measurement_alone(out):
    run_plan(plan(), out, jobs=2)
    (out / "runs/mine/seed-0/checkpoint-2").mkdir()
    run_plan(plan(), out, jobs=1)
    assert jobs_of(plan(), out) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"rank": 90}, "choose at most 16"), ({"target_modules": ["nowhere"]}, "nowhere")],
)
def test_a_variant_that_cannot_be_converted_is_refused_before_training(fields, message, tmp_path):
    broken = plan(variants={**MINE, "broken": {"scheme": "metis", **fields}})
    with pytest.raises(ValueError, match=f"variant 'broken': .*{message}"):
        run_plan(broken, tmp_path)
    for name in ("settings.json", "data", "runs"):
        assert not (tmp_path / name).exists()


def test_times_are_of_what_was_trained_and_take_nothing_with_them(tmp_path, monkeypatch, capsys):
    """One variant failed, and the others do not fit into memory at once."""
    timed, written = [], []

    def fail(*args, **kwargs):
        raise comparison.RunsFailed("1 of 2 runs failed; why")

    def measure(asked, out):
        timed.append([variant.name for variant in asked.variants])
        raise RuntimeError("out of memory")

    results = [SchemeResult("bf16", {"scheme": "bf16"}, "", 2.0, {}, 0.1, [])]
    monkeypatch.setattr(comparison, "run_plan", fail)
    monkeypatch.setattr(comparison, "load_results", lambda *_: results)
    monkeypatch.setattr(timing, "measure_times", measure)
    monkeypatch.setattr(
        outputs, "write_outputs", lambda plan, found, *_, **__: written.append(found)
    )
    command = ["metis-hf", "compare", "--schemes", "bf16,nvfp4", "--times", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert (timed, written) == ([["bf16"]], [results])
    error = capsys.readouterr().err
    assert "1 of 2 runs failed; why" in error
    assert "--times: steps were not timed: out of memory" in error


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "0"]),
        ("2,5", ["2", "5", "2"]),
    ],
)
def test_runs_share_the_accelerators(visible, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(comparison, "_devices", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = [_slot_environment(slot, 3) for slot in range(3)]  # more of them than devices
    assert found == [{"CUDA_VISIBLE_DEVICES": name} for name in expected]
    assert [_default_jobs(runs) for runs in (0, 1, 2, 3)] == [1, 1, 2, 2]


def test_runs_share_the_threads_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(comparison, "_devices", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = [_slot_environment(0, slots)["OMP_NUM_THREADS"] for slots in (1, 3, 8, 9)]
    assert threads == ["8", "2", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _slot_environment(0, 3) == {"OMP_NUM_THREADS": "5"}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert _slot_environment(0, 3) == {}  # of another kind than CUDA


def test_a_run_remembers_all_code_that_trained_it(out, monkeypatch):
    """Also of commands before the last; code that trained nothing does not count."""
    spec = out / "runs/mine/seed-0/run.json"
    for code, earlier in (("a", []), ("b", []), ("c", ["b"]), ("b", ["b", "c"]), ("b", ["c"])):
        monkeypatch.setattr(comparison, "code_digest", lambda code=code: code)
        run_plan(plan(), out)
        found = json.loads(spec.read_text())
        assert found["code"] == code
        assert set(found["earlier_code"]) == set(earlier) - {code}
        if code != "a":
            (spec.parent / "checkpoint-2").mkdir(exist_ok=True)


def test_task_data_that_changed_is_refused(out, tmp_path):
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name in ("piqa.jsonl", "race.jsonl"):
        (tasks / name).write_bytes((EVAL_DATA / name).read_bytes())
    asked = plan(tasks=["piqa"], tasks_dir=str(tasks))
    run_plan(asked, out / "run")
    (tasks / "piqa.jsonl").write_bytes((EVAL_DATA / "piqa.jsonl").read_bytes() * 2)
    with pytest.raises(ValueError, match=rf"{tasks} changed after"):
        run_plan(asked, out / "run")
