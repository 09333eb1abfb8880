"""Which recordings are kept: as many as memory allows, of precisions that come back too."""

from __future__ import annotations

import pytest
import torch
from conftest import llama

from metis_hf import (
    MetisConfig,
    PrecisionSchedule,
    get_metis_model,
    high_precision,
    set_precision,
)
from metis_hf.training import cuda_graph
from metis_hf.training.cuda_graph import StepGraphs
from training.test_cuda_graph import Again, Rows, assert_same, train


def test_beyond_the_most_recordings_steps_run_in_python(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(cuda_graph, "_MOST", 1)
    changes = {"data": Rows(64, (24, 16)), "max_steps": 10, "scheme": "nvfp4"}
    plain, recorded = (train(tmp_path, str(r), r, **changes) for r in (None, Again))
    assert_same(plain, recorded)
    assert recorded[2]._graphs.recordings == 1
    said = [r.getMessage() for r in caplog.records if "kinds of steps" in r.getMessage()]
    assert said == [
        "cuda_graphs: 1 kinds of steps are recorded, and each keeps the memory of a step; all "
        "others run in Python. Pad batches to fewer lengths"
    ]


def test_another_precision_is_recorded_anew(tmp_path) -> None:
    def schedule() -> PrecisionSchedule:
        return PrecisionSchedule(until=0.5, high_precision=("forward",))

    changes = {"max_steps": 10, "scheme": "nvidia"}
    plain, recorded = (
        train(tmp_path, str(r), r, callbacks=[schedule()], **changes) for r in (None, Again)
    )
    assert_same(plain, recorded)
    assert recorded[2]._graphs.recordings == 2


@pytest.fixture
def graphs():
    """Recordings of a model, and what runs as many steps as are needed for one, and one more."""
    model = get_metis_model(llama(num_hidden_layers=1), MetisConfig(scheme="nvfp4")).train()
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
    """Also that of a block, though each switch makes schemes anew."""
    model, made, run = graphs
    for played in (4 * 2, 4 * (cuda_graph.WARM_UP + 2)):
        made._record.played = 0
        for passes in ((), ("forward",)):
            set_precision(model, high_precision=passes)
            run()
            with high_precision(model):
                run()
        assert made._record.played == played
    assert made.recordings == len(made._made) == 4


def test_recordings_of_another_precision_make_room(graphs) -> None:
    model, made, run = graphs
    for length in range(8, 8 + cuda_graph._MOST):
        run(length)
    set_precision(model, high_precision=("forward",))
    played = made._record.played
    run()
    assert made._record.played > played
    assert len(made._made) == cuda_graph._MOST
