"""Two real processes: transformers' tensor parallelism against one process, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

from training import parallel_cases as cases
from training.distributed_run import RANKS
from training.test_distributed import launch

pytestmark = pytest.mark.slow

TOLERANCE = 1e-9  # fp64 GEMMs of the same codes; sums over processes come in another order


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(engine, case) -> what each rank saw."""
    out = tmp_path_factory.mktemp("ranks")
    seen = {}

    def results(engine, case):
        if (engine, case) not in seen:
            launch(f"{engine}-{case}", out, case)
            files = [out / f"{engine}-{case}.{rank}.pt" for rank in range(RANKS)]
            seen[engine, case] = [torch.load(file, weights_only=False) for file in files]
        return seen[engine, case]

    return results


def agree(one, other):
    assert one["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)
    assert one["grads"].keys() == other["grads"].keys()
    for name, grad in one["grads"].items():
        difference = (grad - other["grads"][name]).abs().max() / grad.abs().max()
        assert difference <= TOLERANCE, name


@pytest.mark.parametrize("scheme", cases.SCHEMES)
def test_tensor_parallelism_equals_one_process(ranks, scheme):
    for result in ranks("native", "cutting"):
        agree(result[scheme]["whole"], result[scheme]["cut"])
        assert result[scheme]["saved"]


@pytest.mark.parametrize("size", ["tp_size", "fsdp_size"])
def test_a_dense_checkpoint_converts_while_it_is_spread(ranks, size):
    for result in ranks("native", "cutting"):
        agree(result["nvfp4"]["whole"], result[f"dense {size}"])


def test_trainer_under_tensor_parallelism(ranks, tmp_path):
    """The losses and weights of one process that sees the same batches, saved whole."""
    alone = cases.trained("one", tmp_path)
    for result in ranks("tp", "trained"):
        assert len(result["losses"]) == 4
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        for name, weight in alone["state"].items():
            torch.testing.assert_close(result["state"][name], weight, rtol=1e-5, atol=1e-7)
            assert torch.equal(result["reloaded"][name].double(), result["state"][name]), name


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("split", "tp_size=2 cannot shard .*q_proj, because its weight is stored in several"),
        (
            "dense split",
            "fsdp_size=2 is not supported while a dense checkpoint is converted: .*save_pretrained",
        ),
        ("converted late", "is already sharded over processes .tp_size=2."),
        ("narrow", "blocks of 32 along out_features=32 would be split between the 2 processes"),
        ("experts", "tp_size=2 is not supported for converted experts"),
        (
            "packed",
            r"packed cannot be loaded with DistributedConfig\(tp_size=2\): "
            r"packed weights are frozen buffers",
        ),
        ("ep", "ep_size=2 is not supported for a converted model: expert parallelism"),
        ("pp", "pp_size=2 is not supported for a converted model: pipeline parallelism"),
    ],
)
def test_refused_while_loading(ranks, case, message):
    for result in ranks("native", "refusing"):
        assert result[case] is not None
        assert result[case].startswith("NotImplementedError")
        assert re.search(message, result[case])


@pytest.mark.parametrize("case", ["callback", "plain"])
def test_context_parallelism_is_refused_before_a_step(ranks, case):
    for result in ranks("fsdp", "sequences"):
        error, steps = result[case]
        assert error is not None
        assert (
            "ParallelismConfig(cp_size=2) is not supported: context parallelism splits sequences"
            in error
        )
        assert steps == 0
