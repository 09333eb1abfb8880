"""What a batch may hold whose step is recorded, and which recordings are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from metis_hf import PrecisionSchedule, high_precision, set_precision
from metis_hf.training import cuda_graph
from metis_hf.training.cuda_graph import StepGraphs
from training.recordings import Again
from training.test_cuda_graph import recorded_as_plain, rows
from training.trainer_tools import converted


def test_beyond_the_most_recordings_steps_run_in_python(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(cuda_graph, "MOST_RECORDINGS", 1)
    graphs = recorded_as_plain(tmp_path, data=rows(64, (24, 16)), max_steps=10)
    assert graphs.recordings == 1
    said = [r.getMessage() for r in caplog.records if "kinds of steps" in r.getMessage()]
    assert said == [
        "cuda_graphs: 1 kinds of steps are recorded, each of which keeps the memory of a "
        "step; all other kinds run in Python. Pad batches to fewer distinct lengths"
    ]


def test_another_precision_has_its_recording(tmp_path) -> None:
    schedules = ([PrecisionSchedule(until=0.5, high_precision=("forward",))] for _ in range(2))
    plain, callbacks = schedules
    graphs = recorded_as_plain(tmp_path, plain=plain, callbacks=callbacks, max_steps=10)
    assert graphs.recordings == 2


@pytest.fixture
def graphs():
    """Recordings of a model, and what runs as many steps as are needed for one, and one more."""
    model = converted("nvfp4").train()
    made = StepGraphs(model, Again(model))

    def step(inputs, count):
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    def run(length=8):
        ids = torch.arange(length)[None]
        for _ in range(cuda_graph.WARM_UP + 2):
            made.run(step, {"input_ids": ids, "labels": ids}, None)

    return model, made, run


def test_a_precision_that_comes_back_has_its_recordings(graphs) -> None:
    """Also that of a block, though each switch makes other schemes."""
    model, made, run = graphs
    for played in (4 * 2, 4 * (cuda_graph.WARM_UP + 2)):
        made.record.played = 0
        for passes in ((), ("forward",)):
            set_precision(model, high_precision=passes)
            run()
            with high_precision(model):
                run()
        assert made.record.played == played
    assert made.recordings == len(made.made) == 4


def test_recordings_of_another_precision_make_room(graphs) -> None:
    model, made, run = graphs
    for length in range(8, 8 + cuda_graph.MOST_RECORDINGS):
        run(length)
    set_precision(model, high_precision=("forward",))
    played = made.record.played
    run()
    assert made.record.played > played
    assert len(made.made) == cuda_graph.MOST_RECORDINGS


def _graphs_of_sums():
    """(recordings of a step whose loss is a weight times what the batch holds, its places)."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    graphs = StepGraphs(model, Again(model))

    def run(batch):
        def step(inputs, count):
            (pixels,) = inputs["extra"]["pixels"]
            loss = (model.weight * (pixels.sum() + inputs["x"].sum())).sum()
            loss.backward()
            return loss.detach()

        return graphs.run(step, batch, None).item()

    return graphs, run


def test_tensors_inside_a_batch_are_copied_in() -> None:
    """Of 2,000 elements: what is printed of such a tensor does not tell two of them apart."""
    graphs, run = _graphs_of_sums()
    for index in range(7):
        pixels = torch.zeros(2000)
        pixels[500] = index
        assert run({"x": torch.tensor([10.0 * index]), "extra": {"pixels": [pixels]}}) == 11 * index
    assert graphs.recordings == 1
    assert graphs.record.played == 7 - cuda_graph.WARM_UP


def test_a_batch_of_something_else_runs_in_python() -> None:
    class Box(dict):
        """What the flattening of batches does not know."""

    graphs, run = _graphs_of_sums()
    for index in range(7):
        extra = Box(pixels=[torch.tensor([float(index)])])
        assert run({"x": torch.zeros(1), "extra": extra}) == index
    assert graphs.recordings == 0
    assert "contains a Box" in graphs.refused


@pytest.mark.parametrize(("value", "recorded"), [(np.arange(3), 0), (np.int64(3), 1)])
def test_what_numpy_puts_into_a_batch(value, recorded) -> None:
    graphs, run = _graphs_of_sums()
    for index in range(5):
        pixels = [torch.tensor([float(index)])]
        assert run({"x": torch.zeros(1), "extra": {"pixels": pixels, "meta": value}}) == index
    assert graphs.recordings == recorded
