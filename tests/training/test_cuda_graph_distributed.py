"""Recorded steps in two real processes, with a stand-in for CUDA graphs."""

from __future__ import annotations

import re

import pytest
import torch

from training.distributed_run import RANKS
from training.recorded_cases import CONFIGS
from training.test_distributed import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(engine, case) -> what each rank saw."""
    out = tmp_path_factory.mktemp("ranks")
    for engine, cases in {"ddp": "recorded spare_parameter", "fsdp": "recorded"}.items():
        launch(engine, out, cases)

    def results(engine, case):
        files = [out / f"{engine}-{case}.{rank}.pt" for rank in range(RANKS)]
        return [torch.load(file, weights_only=False) for file in files]

    return results


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_recorded_steps_equal_those_in_python(ranks, engine, config) -> None:
    """DDP averages the latter's gradients. The processes begin to record at different times."""
    results = ranks(engine, "recorded")
    first, second = (result[config, True] for result in results)
    assert first["played"] > second["played"] > 0
    same(first["state"], second["state"])
    if engine == "ddp":
        same(first["buffers"], second["buffers"])
    same(first["buffers"], results[0][config, False]["buffers"])
    for result in results:
        played, plain = result[config, True], result[config, False]
        assert plain["played"] == 0
        assert (played["loss"], played["grad_norm"]) == (plain["loss"], plain["grad_norm"])
        same(played["state"], plain["state"])


def same(state, other) -> None:
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


def test_a_parameter_without_a_gradient_is_named(ranks) -> None:
    for error in ranks("ddp", "spare_parameter"):
        assert re.search(
            r"ValueError: cuda_graphs: 1 of \d+ trainable parameters have no gradient, "
            r"the first is spare, .* Freeze",
            error,
        )
