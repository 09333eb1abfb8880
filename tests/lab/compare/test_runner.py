"""What a run trains on, the clock of its steps, and the memory that it takes."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from training import trainer_tools

from lab.compare.comparing import CONFIG
from metis_hf.lab.compare import meters, worker
from metis_hf.lab.compare.plan import make_plan, with_accumulation
from metis_hf.lab.compare.training import train, training_arguments, whole_batches
from metis_hf.lab.compare.variants import Experiment
from metis_hf.shared import checkpoints
from metis_hf.training import uncalled


def dataset(ids):
    import datasets  # takes a second

    return datasets.Dataset.from_dict({"input_ids": ids})


def arguments(folder, steps):
    return trainer_tools.arguments(folder, max_steps=steps, gradient_accumulation_steps=2)


def test_every_step_of_several_epochs_has_a_whole_batch(tmp_path):
    """The last sequences of an epoch would be a smaller batch, and its tokens counted in full."""
    rows = dataset([[n] for n in range(10)])
    found = whole_batches(rows, arguments(tmp_path, steps=3))
    assert [row["input_ids"] for row in found] == [[n] for n in range(8)]
    ids = torch.arange(10)
    found = whole_batches(torch.utils.data.TensorDataset(ids), arguments(tmp_path, steps=3))
    assert [int(row[0]) for row in found] == list(range(8))
    # Nothing is taken off a run within one epoch.
    assert whole_batches(rows, arguments(tmp_path, steps=2)) is rows


def test_less_than_a_batch_is_refused(tmp_path):
    rows = dataset([[1]] * 3)
    with pytest.raises(ValueError, match="3 training sequences do not fill one batch of 4"):
        whole_batches(rows, arguments(tmp_path, steps=1))


@pytest.mark.slow
def test_curves_and_health_go_to_the_reporter_of_the_experiment(tmp_path):
    """Of a run that is called after its variant and seed."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plan = make_plan(None, **CONFIG | {
        "training": {"max_steps": 2, "report_to": "tensorboard"}, "health_interval": 1,
    })  # fmt: skip
    rows = dataset(torch.randint(0, 300, (8, 32)).tolist()).with_format("torch")
    run = tmp_path / "nvfp4/seed-0"
    experiment = with_accumulation(plan.experiment, plan.global_batch, 1)
    trained = train(experiment, plan.variants[1], rows, None, run, lambda *step: None)
    assert trained.trainer.args.run_name == "nvfp4/seed-0"
    (file,) = run.rglob("events.out.tfevents.*")
    tags = events.EventAccumulator(str(file)).Reload().Tags()["scalars"]
    assert {"train/loss", "train/metis/weight/sqnr_db", "train/metis/noise/ratio"} <= {*tags}


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_memory_is_the_peak_where_there_is_no_proc(platform, unit, monkeypatch):
    """Also where what was in use then is free again."""

    def missing(path, *args):
        raise FileNotFoundError

    peaks = iter((100, 700, 700))
    for method in ("read_text", "write_text"):
        monkeypatch.setattr(Path, method, missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=next(peaks)))
    memory = meters.PeakMemory()
    assert [memory.bytes(), memory.bytes()] == [600 * unit] * 2


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


@pytest.mark.parametrize(("every", "logged"), [(10, 4), (0.5, 2)])
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


def test_layers_that_a_run_does_not_call_are_named_at_once(monkeypatch, capsys):
    """Where libraries are silent: to the process that shows them, and in the log."""
    for logger in (checkpoints.logger, uncalled.logger):
        monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(sys, "argv", ["worker", "run"])
    monkeypatch.setattr(worker, "run", lambda _: uncalled.warn_of_unpacked(["head"], ["up"]))
    worker.main()
    said = capsys.readouterr()
    note = json.loads(said.out)["note"]
    assert "0 of 1 converted layers, but not head." in note
    assert said.err.strip() == note
