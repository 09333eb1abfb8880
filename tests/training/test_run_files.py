"""What MetisCallback writes into the logs and files of a run, and when."""

from __future__ import annotations

import pytest
import transformers

from metis_hf import MetisCallback, MetisTrainer
from metis_hf.training.run_record import HEALTH_FILE, LOG_FILE, RUN_FILE
from training.trainer_tools import converted, lines, rows, trainer


def nvfp4():
    return converted("nvfp4")


def logged(directory, key):
    """The log entries that have a key."""
    return [entry for entry in lines(directory, LOG_FILE) if key in entry]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"logging_steps": 4}, [1, 3, 4, 6]),
        ({"logging_steps": 500}, [1, 3, 6]),
        ({"logging_strategy": "no"}, []),
    ],
)
def test_a_measured_step_is_logged(tmp_path, changes, steps):
    """Its means stand in the record of its own loss, however seldom others are logged."""
    callback = MetisCallback(health_interval=3, health_details="layers")
    made = trainer(tmp_path, nvfp4(), [callback], max_steps=6, **changes)
    made.train()
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == steps
    layer = "model.layers.0.self_attn.q_proj"
    measured = {e["step"]: e[f"metis/weight/{layer}/sqnr_db"] for e in entries if e["step"] != 4}
    records = {record["step"]: record["layers"] for record in lines(tmp_path, HEALTH_FILE)}
    assert list(records) == [1, 3, 6]
    for step, value in measured.items():
        assert value == records[step][layer]["weight"]["sqnr_db"]


def test_refreshes_between_two_entries_are_logged_as_the_largest(tmp_path, monkeypatch):
    drifts = iter([1e-7, 3e-7, 2e-7])
    monkeypatch.setattr("metis_hf.training.callback.refresh", lambda *_: {"layer": next(drifts)})
    model = converted(split_weight=True, refresh_interval=1)
    made = trainer(tmp_path, model, [MetisCallback(health_interval=0)],
                   max_steps=3, logging_steps=3)  # fmt: skip
    made.train()
    assert made.state.log_history[0]["metis/refresh_drift"] == 3e-7


class TestEvaluationsBeforeTraining:
    def test_a_finished_run_is_left_as_it_is(self, tmp_path):
        """A script that evaluates the trained model is no part of the run."""
        trainer(tmp_path, nvfp4(), [MetisCallback(0)], max_steps=2).train()
        before = (tmp_path / LOG_FILE).read_bytes()
        trainer(tmp_path, nvfp4(), [MetisCallback(0)]).evaluate(rows(4))
        assert (tmp_path / LOG_FILE).read_bytes() == before

    def test_a_new_run_begins_with_its_own(self, tmp_path):
        (tmp_path / LOG_FILE).write_text('{"step": 0, "eval_loss": 9.0}\n{"step": 1, "loss": 9}\n')
        made = trainer(tmp_path, nvfp4(), [MetisCallback(0)], max_steps=1)
        loss = made.evaluate(rows(4))["eval_loss"]
        made.train()
        after = made.evaluate(rows(4))["eval_loss"]
        found = [(entry["step"], entry["eval_loss"]) for entry in logged(tmp_path, "eval_loss")]
        assert found == [(0, loss), (1, after)]
        assert [entry["step"] for entry in logged(tmp_path, "loss")] == [1]

    def test_a_resumed_run_has_none_of_them(self, tmp_path):
        first = trainer(tmp_path, nvfp4(), [MetisCallback(0)],
                        max_steps=1, save_strategy="steps", save_steps=1)  # fmt: skip
        first.train()
        second = trainer(tmp_path, nvfp4(), [MetisCallback(0)], max_steps=2)
        second.evaluate(rows(4))
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert not logged(tmp_path, "eval_loss")
        assert [entry["step"] for entry in logged(tmp_path, "loss")] == [1, 2]


class TestSearch:
    def search(self, folder, cls, trials):
        pytest.importorskip("optuna", reason="optuna is not installed")
        made = trainer(folder, nvfp4, [MetisCallback(0)], cls, max_steps=1)
        made.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)},
            n_trials=trials,
            backend="optuna",
            direction="minimize",
        )
        return made

    def test_each_trial_keeps_its_records(self, tmp_path):
        """Where its checkpoints are; a training after the search has the directory itself."""
        made = self.search(tmp_path, MetisTrainer, trials=2)
        for name in ("run-0", "run-1"):
            assert [entry["step"] for entry in logged(tmp_path / name, "loss")] == [1]
            assert (tmp_path / name / RUN_FILE).is_file()
        assert not (tmp_path / LOG_FILE).exists()
        made.train()
        assert [entry["step"] for entry in logged(tmp_path, "loss")] == [1]

    def test_a_trainer_that_cannot_say_which_trial_it_is(self, tmp_path, monkeypatch):
        said = []
        monkeypatch.setattr(
            "metis_hf.training.callback.logger.warning", lambda text, *_: said.append(text)
        )
        self.search(tmp_path, transformers.Trainer, trials=1)
        assert sum("overwrites the records of the previous trial" in text for text in said) == 1
