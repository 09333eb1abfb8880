"""What a batch may hold whose step is recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from metis_hf.training import cuda_graph
from metis_hf.training.cuda_graph import StepGraphs
from training.test_cuda_graph import Again


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
    assert graphs._record.played == 7 - cuda_graph.WARM_UP


def test_a_batch_of_something_else_runs_in_python() -> None:
    class Box(dict):
        """What the flattening of batches does not know."""

    graphs, run = _graphs_of_sums()
    for index in range(7):
        extra = Box(pixels=[torch.tensor([float(index)])])
        assert run({"x": torch.zeros(1), "extra": extra}) == index
    assert graphs.recordings == 0
    assert "holds a Box" in graphs.refused


@pytest.mark.parametrize(("value", "recorded"), [(np.arange(3), 0), (np.int64(3), 1)])
def test_what_numpy_puts_into_a_batch(value, recorded) -> None:
    graphs, run = _graphs_of_sums()
    for index in range(5):
        pixels = [torch.tensor([float(index)])]
        assert run({"x": torch.zeros(1), "extra": {"pixels": pixels, "meta": value}}) == index
    assert graphs.recordings == recorded
