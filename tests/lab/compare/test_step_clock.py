"""The clock of training steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from metis_hf.lab.compare import meters
from metis_hf.lab.compare.training import training_arguments
from metis_hf.lab.compare.variants import Experiment


def test_an_accelerator_has_ended_its_work_when_the_clock_is_read(monkeypatch):
    """Launched kernels take 3 s, which no clock of the CPU sees before a synchronization."""
    now, queued = [100.0], [0.0]

    def synchronize():
        now[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    said: list[tuple] = []
    clock = meters.StepClock(lambda *values: said.append(values))
    state = SimpleNamespace(log_history=[{"loss": 2.0}], global_step=1)
    queued[0] = 50.0  # of what ran before
    clock.on_step_begin(None, state, None)
    now[0] += 1.0
    queued[0] = 3.0
    clock.on_optimizer_step(None, state, None)
    clock.on_log(None, state, None, logs={"loss": 2.0})
    assert state.log_history[-1]["step_seconds"] == 4.0
    assert said == [(1, 2.0)]


@pytest.mark.parametrize(("every", "logged"), [(10, 4), (3, 3), (0.5, 2)])
def test_a_short_run_is_logged_at_least_once(every, logged):
    """Its last step is, where the experiment logs more seldom than it has steps."""
    training = {"max_steps": 4, "logging_steps": every}
    experiment = Experiment(
        model={}, training=training, sequence_length=8, health_interval=0, seed=0
    )
    arguments = training_arguments(experiment, Path("unused"))
    state = transformers.TrainerState(max_steps=4)
    state.compute_steps(arguments, max_steps=4)
    assert state.logging_steps == logged
    assert training["logging_steps"] == every  # what the comparison is recorded with
