"""What users plot: spectral health in Trainer's log history and in its reporters' real output."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.integrations.integration_utils import rewrite_logs

from metis_hf import MetisCallback, MetisTrainer
from metis_hf.training.callback import HEALTH_FILE
from metis_hf.training.gradient_noise import noise_ratios
from metis_hf.training.health import group_means
from training.trainer_tools import converted, lines, metis_values, records, trainer


class Reporter(transformers.TrainerCallback):
    """Stands where Trainer puts W&B: before every callback of the user's."""

    def __init__(self):
        self.seen = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.setdefault(state.global_step, {}).update(rewrite_logs(logs))


def with_metis_trainer(directory, reporter, **changes):
    callbacks = [reporter, MetisCallback(health_interval=2)]
    return trainer(directory, converted("nvfp4"), callbacks, MetisTrainer, **changes)


def with_bound_callback(directory, reporter, **changes):
    callbacks = [reporter, MetisCallback(health_interval=2)]
    made = trainer(directory, converted("nvfp4"), callbacks, **changes)
    callbacks[1].bind(made)
    return made


def assert_sees_health(reporter, made):
    """What the last step has in the log history, in full."""
    last = records(made)[-1]
    seen = {k: v for k, v in reporter.seen[last["step"]].items() if k.startswith("train/metis/")}
    assert seen == {f"train/{key}": value for key, value in metis_values(last).items()}
    assert seen


@pytest.mark.parametrize("make", [with_metis_trainer, with_bound_callback])
def test_reporters_and_files_have_the_same_values(make, tmp_path):
    """One record a step, in the log history, a reporter, TensorBoard's files and the JSONL."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="pip install metis-hf[test] brings tensorboard",
    )
    reporter = Reporter()
    made = make(tmp_path, reporter, report_to=["tensorboard"])
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
        rest = {"metis/nonfinite_tensors": 0.0}
        assert measured[line["step"]] == means | rest

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
    made = with_metis_trainer(tmp_path, Reporter(), report_to=["wandb"])
    made.train()
    try:
        summary = dict(wandb.run.summary)
    finally:
        wandb.finish()
    measured = metis_values(records(made)[-1])
    assert measured
    found = {k: v for k, v in summary.items() if k.startswith("train/metis/")}
    assert found == {f"train/{key}": value for key, value in measured.items()}


def test_unbound_callback_warns_once(tmp_path, caplog):
    """A reporter that will not see health: said once, with what to do."""
    made = trainer(tmp_path, converted("nvfp4"), [MetisCallback])
    made.args.report_to = ["tensorboard"]
    made.train()
    said = [r.message for r in caplog.records if "calls its reporters before" in r.message]
    assert len(said) == 1
    assert "Use MetisTrainer, or callback.bind(trainer)" in said[0]


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
