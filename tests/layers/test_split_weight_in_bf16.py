"""Split weights in 16 bits: the residual holds what rounding took off the factors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metis_hf import MetisConfig, get_metis_model, metis_layers, refresh


def off(model: nn.Module, w: torch.Tensor) -> float:
    """Distance of the represented weight, summed up in fp64, from w; relative."""
    _, layer = next(metis_layers(model))
    u, s, vh, residual = (p.detach().double() for p in layer.weight_params())
    found = (u * s * layer.weight_form.gain) @ vh + residual
    return ((found - w).norm() / w.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["metis", "metis-paper"])
def test_only_the_residual_is_rounded(scheme, dtype) -> None:
    """At conversion, and at each refresh, which so does not move the weight away."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 192)).to(dtype)
    w = model[0].weight.detach().double()
    config = MetisConfig(scheme=scheme, split_weight=True, target_modules="all-linear")
    get_metis_model(model, config)
    # A residual nearly as large as the weight; without its share of the factors .44 to .56.
    rounding = torch.finfo(dtype).eps / 2
    assert off(model, w) < 0.41 * rounding
    for _ in range(5):
        (drift,) = refresh(model).values()
        assert drift < 0.41 * rounding
    assert off(model, w) < 0.9 * rounding
