"""Runs that end, evaluate or stop between two log entries, told by what they have written."""

from __future__ import annotations

import json
import math

import pytest

from metis_hf.lab.run_report import figures
from metis_hf.lab.run_report.page import run_page
from metis_hf.lab.run_report.read import read_run
from metis_hf.lab.run_report.run import events
from metis_hf.training.run_record import HEALTH_FILE, LOG_FILE

STATE = "trainer_state.json"


def end(step, rate, seconds=120.0):
    """What Trainer logs at the end of a call."""
    return {"step": step, "train_runtime": seconds, "train_steps_per_second": rate}


def write_log(folder, *entries):
    (folder / LOG_FILE).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(figures, "as_png", lambda figure: b"")


def test_a_run_ends_where_its_last_entry_says(tmp_path):
    """60 steps with the default logging_steps, of which the first was measured: 2 s a step."""
    write_log(tmp_path, end(60, 0.5))
    (tmp_path / HEALTH_FILE).write_text('{"step": 1, "layers": {"up": {"weight": {}}}}\n')
    run = read_run(tmp_path)
    assert run.last_step == 60
    assert run.seconds_per_step == pytest.approx(2.0)


@pytest.mark.parametrize(("rate", "seconds"), [(700 / 120, 120 / 700), (200 / 120, 0.6)])
def test_step_time_is_of_all_steps_of_the_call(rate, seconds, tmp_path):
    """Of 700 with a loss at 500, all made in one call or resumed after step 500."""
    write_log(tmp_path, {"step": 500, "loss": 2.0}, end(700, round(rate, 3)))
    run = read_run(tmp_path)
    assert run.last_step == 700
    assert run.seconds_per_step == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    "record",
    [{"noise": {"up": [3.0, 1.0]}}, {"switch": {"scheme": "metis", "high_precision": []}}],
    ids=["noise", "switch"],
)
def test_every_record_says_how_far_a_run_has_come(record, tmp_path):
    write_log(tmp_path, {"step": 3, "loss": 2.0}, {"step": 5, "eval_loss": 2.0})
    assert read_run(tmp_path).last_step == 5
    (tmp_path / HEALTH_FILE).write_text(json.dumps({"step": 8, **record}) + "\n")
    assert read_run(tmp_path).last_step == 8


def test_step_times_of_a_result_stay_beside_the_log(tmp_path):
    """The callback writes an entry before the step's time is put into it."""
    measured = {"step": 1, "loss": 3.0, "metis/nonfinite_tensors": 0.0}
    plain = {"step": 2, "loss": 2.9}
    write_log(tmp_path, measured, plain, end(2, 0.2, 10.0))
    history = [measured | {"step_seconds": 9.0}, plain | {"step_seconds": 1.0}]
    (tmp_path / "result.json").write_text(json.dumps({"history": history}))
    run = read_run(tmp_path)
    assert run.history == history
    assert run.seconds_per_step == 1.0


def test_evaluations_are_drawn_without_a_training_loss(tmp_path, undrawn):
    write_log(tmp_path, *({"step": step, "eval_loss": 2.0} for step in (50, 100)))
    run = read_run(tmp_path)
    page = run_page(run).render()
    assert "No losses were recorded" not in page
    assert page.count("<figure") == 1
    (note,) = (note for note in run.notes if "loss" in note)
    assert note.startswith("No training loss: none was logged. Trainer logs one every logging_st")


def test_the_end_of_a_run_is_no_other_run(tmp_path):
    """As after trainer.save_state(): the state's last entry has no loss."""
    entries = [{"step": 500, "loss": 2.0}, end(700, 5.0)]
    write_log(tmp_path, *entries)
    state = {"global_step": 700, "num_input_tokens_seen": 44_800, "log_history": entries}
    (tmp_path / STATE).write_text(json.dumps(state))
    run = read_run(tmp_path)
    assert not any("earlier run" in note for note in run.notes)
    assert run.tokens == 44_800


def test_an_evaluation_that_is_not_finite_is_an_event(tmp_path, undrawn):
    write_log(
        tmp_path,
        {"step": 5, "loss": 2.0, "grad_norm": 1.0},
        {"step": 5, "eval_web_loss": math.nan, "eval_code_loss": 2.0},
    )
    run = read_run(tmp_path)
    assert events(run) == [(5, "not finite", "eval_web_loss is nan")]
    page = run_page(run).render()
    assert "every figure was finite" not in page
    assert "steps with NaN or inf" in page


@pytest.mark.parametrize("saved", [None, 500, 1100])
def test_tokens_are_those_of_the_last_entry(saved, tmp_path):
    """Of a killed run, with checkpoints or without; one may be newer than the last entry."""
    entries = [{"step": s, "loss": 2.0, "num_input_tokens_seen": 64 * s} for s in (500, 900)]
    write_log(tmp_path, *entries)
    if saved is not None:
        state = {"global_step": saved, "num_input_tokens_seen": 64 * saved, "log_history": []}
        (tmp_path / STATE).write_text(json.dumps(state))
    assert read_run(tmp_path).tokens == 64 * max(900, saved or 0)


def test_a_note_on_the_log_names_the_line(tmp_path):
    lines = ['{"step": 1, "loss": 3.0}', "broken", '{"step": 3, "loss": "x"}']
    (tmp_path / LOG_FILE).write_text("\n".join(lines) + "\n")
    notes = read_run(tmp_path).notes
    assert f"{LOG_FILE}: left out line 2 (no JSON)." in notes
    assert f"{LOG_FILE}: left out line 3 (loss is 'x', no number)." in notes
