"""What operations cost, counted by hand, and what recomputing blocks adds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import llama

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.conversion.report import gemm_weights
from metis_hf.lab.cost import meta_model
from metis_hf.lab.planning.costs import LayerCost, _ElementCount, _quantizer_cost, forward_cost
from metis_hf.lab.planning.plan import step_costs
from metis_hf.lab.planning.workload import Workload
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer, Rounding


def test_elements_by_hand():
    """A sum of two [4 8] reads both and writes one; its maximum reads it; a view is free."""
    a, b = torch.ones(4, 8), torch.ones(4, 8, dtype=torch.bfloat16)
    with _ElementCount() as count:
        torch.empty(100)
        total = (a + b).view(8, 4)
        assert (count.operations, count.bytes) == (32, 32 * (4 + 2 + 4))
        total.amax()
    assert (count.operations, count.bytes) == (64, 32 * (4 + 2 + 4) + 33 * 4)


@pytest.mark.parametrize("rounding", list(Rounding))
def test_quantizer_cost_is_that_of_a_real_call(rounding):
    quantizer = Quantizer(rounding=rounding)
    x = torch.randn(64, 128)
    quantizer(x, dim=-1, key=Key(0))
    with _ElementCount() as count:
        quantizer(x, dim=-1, key=Key(0))
    expected = LayerCost(quantizers=count.operations, quantizer_bytes=count.bytes)
    assert _quantizer_cost(quantizer, 64, 128) == expected
    assert count.bytes >= 2 * 4 * x.numel()  # at the very least one read and one write


def test_recomputed_blocks_quantize_again():
    """The forward pass of every block's layers, which of a quantized head runs once."""
    load = Workload(tokens=1000, sequence_length=48, global_batch=4, device_batch=2)
    plain = meta_model(llama().config)
    gemms = gemm_weights(plain)
    metis = MetisConfig(scheme="nvidia", target_modules=r".*(_proj|lm_head)")
    model = get_metis_model(plain, metis)
    once = step_costs(model, gemms, load)
    twice = step_costs(model, gemms, dataclasses.replace(load, checkpointing=True))
    costs = [forward_cost(layer, 2 * 48) for n, layer in metis_layers(model) if n != "lm_head"]
    assert len(costs) == 14
    added = 2 * sum(cost.quantizer_bytes for cost in costs)  # two passes
    assert twice["quantizer_bytes"] == once["quantizer_bytes"] + added
    flops = 2 * sum(cost.flops for cost in costs) + once["attention"] / 3
    assert twice["recomputation"] == pytest.approx(flops)
    gemm = 2 * sum(2 * 2 * 48 * layer.in_features * layer.out_features
                   for n, layer in metis_layers(model) if n != "lm_head")  # fmt: skip
    assert added > 0 < flops - gemm - once["attention"] / 3
