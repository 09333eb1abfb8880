"""A comparison's directory and machine: what it holds of begun runs, how many run side by side."""

from __future__ import annotations

import json

import pytest
import torch
from evaluation.eval_tools import DATA as EVAL_DATA

from experiments.test_compare import CONFIG
from metis_hf.experiments.compare import run as comparison
from metis_hf.experiments.compare.plan import make_plan
from metis_hf.experiments.compare.run import _default_jobs, _slot_environment, jobs_of, run_plan
from metis_hf.experiments.results import SchemeResult, save_result
from metis_hf.experiments.runner import run_variant

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
