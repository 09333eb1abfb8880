"""What users plot: spectral health in Trainer's log history and in its reporters' real output."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.integrations.integration_utils import rewrite_logs

from metis_hf import MetisCallback, MetisTrainer
from metis_hf.training.gradient_noise import noise_ratios
from metis_hf.training.health import group_means
from metis_hf.training.run_record import HEALTH_FILE
from training.trainer_tools import converted, lines, metis_values, records, trainer


class Reporter(transformers.TrainerCallback):
    """Stands where Trainer puts W&B: before every callback of the user's."""

    def __init__(self):
        self.seen = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.setdefault(state.global_step, {}).update(rewrite_logs(logs))


def made_of(cls, directory, reporter, **changes):
    callbacks = [reporter, MetisCallback(health_interval=2, health_details="kinds")]
    return trainer(directory, converted("nvfp4"), callbacks, cls, **changes)


def assert_sees_health(reporter, made):
    """What the last step has in the log history, in full."""
    last = records(made)[-1]
    seen = {k: v for k, v in reporter.seen[last["step"]].items() if k.startswith("train/metis/")}
    assert seen == {f"train/{key}": value for key, value in metis_values(last).items()}
    assert seen


@pytest.mark.parametrize("cls", [transformers.Trainer, MetisTrainer])
def test_reporters_and_files_have_the_same_values(cls, tmp_path):
    """One record a step, in the log history, a reporter, TensorBoard's files and the JSONL."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="pip install metis-hf[test] brings tensorboard",
    )
    reporter = Reporter()
    made = made_of(cls, tmp_path, reporter, report_to=["tensorboard"])
    made.train()
    history = records(made)
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    measured = {e["step"]: metis_values(e) for e in history if metis_values(e)}
    assert list(measured) == [1, 2, 4]
    assert "metis/gradient/down_proj/sqnr_db" in measured[2]

    for step, values in measured.items():
        theirs = {k: v for k, v in reporter.seen[step].items() if k.startswith("train/metis/")}
        assert theirs == {f"train/{key}": value for key, value in values.items()}

    for line in lines(tmp_path, HEALTH_FILE):
        found = group_means(line["layers"]) | noise_ratios(line["noise"])
        means = {f"metis/{key}": value for key, value in found.items()}
        assert means.items() <= measured[line["step"]].items()

    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = accumulator.EventAccumulator(str(file)).Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        if tag.startswith("train/metis/"):
            for event in events.Scalars(tag):
                found.setdefault(event.step, {})[tag.removeprefix("train/")] = event.value
    fp32 = {
        step: {key: torch.tensor(value).item() for key, value in values.items()}
        for step, values in measured.items()
    }
    assert found == fp32


def test_wandb_offline(tmp_path, monkeypatch):
    """The real reporter, without a network: the run's summary holds the last step's values."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    made = made_of(transformers.Trainer, tmp_path, Reporter(), report_to=["wandb"])
    made.train()
    try:
        summary = dict(wandb.run.summary)
    finally:
        wandb.finish()
    measured = metis_values(records(made)[-1])
    assert measured
    found = {k: v for k, v in summary.items() if k.startswith("train/metis/")}
    assert found == {f"train/{key}": value for key, value in measured.items()}


def test_class_instance_or_none(tmp_path):
    """MetisTrainer binds the user's callback, and brings one where there is none."""
    for given in ([], [MetisCallback], [MetisCallback(health_interval=7)]):
        reporter = Reporter()
        made = trainer(tmp_path, converted("nvfp4"), [reporter, *given], MetisTrainer, max_steps=1)
        callbacks = made.callback_handler.callbacks
        assert sum(isinstance(callback, MetisCallback) for callback in callbacks) == 1
        made.train()
        assert_sees_health(reporter, made)


def test_callbacks_that_a_checkpoint_restores_are_bound(tmp_path):
    """Trainer makes new ones of them, with the arguments of those that wrote the checkpoint."""

    def make(interval, **changes):
        reporter, callback = Reporter(), MetisCallback(health_interval=interval)
        options = {"save_strategy": "steps", "save_steps": 2} | changes
        made = trainer(tmp_path, converted("nvfp4"), [reporter, callback], MetisTrainer, **options)
        return made, reporter

    make(2, max_steps=2)[0].train()
    resumed, reporter = make(3, restore_callback_states_from_checkpoint=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    callbacks = resumed.callback_handler.callbacks
    assert callbacks[0].health_interval == 2
    assert len({type(callback) for callback in callbacks}) == len(callbacks)
    assert_sees_health(reporter, resumed)
