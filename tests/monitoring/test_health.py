"""Statistics of tensors at the ends of what fp32 holds, and of zeros."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import llama

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.monitoring.health import operand_health, spectral_norm, stable_rank, weight_health
from metis_hf.noise import Key

NORM_TOLERANCE = 0.05  # of twelve power iterations on normal entries, whose spectrum has no gap


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e7, 1e30])
def test_size_of_a_tensor_does_not_matter(factor):
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.svdvals(x.double()).max().item() * factor
    assert spectral_norm(x * factor).item() == pytest.approx(exact, rel=NORM_TOLERANCE)
    assert stable_rank(x * factor).item() == pytest.approx(stable_rank(x).item(), rel=1e-3)


def converted_layer():
    model = get_metis_model(llama(num_hidden_layers=1), MetisConfig(rank=8))
    return next(layer for _, layer in metis_layers(model))


def test_zeros_have_no_ratios():
    """As gradients behind an output projection that starts at zero, and its weight."""
    layer = converted_layer()
    operand = layer.active_scheme().fprop_input
    found = operand_health(torch.zeros(48, 64), operand, rank=8, key=Key(0))
    assert found == {"nonfinite": 0.0}
    torch.nn.init.zeros_(layer.weight)
    assert weight_health(layer) == {"nonfinite": 0.0}
    torch.nn.init.normal_(layer.weight)
    assert all(math.isfinite(value) for value in weight_health(layer).values())
