"""Models and layers that another quantizer owns are refused, or skipped, by name."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import mixtral
from torch import nn
from versions import reads_packed

from conversion.packed_tools import dense_twin
from metis_hf import MetisConfig, get_metis_model, metis_layers


@pytest.mark.parametrize("called", [False, True])
def test_a_model_of_compressed_tensors(called, checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    if called:  # then it has unpacked its weights
        model(torch.arange(8)[None])
    for targets in ("all-linear", ["lm_head"]):
        with pytest.raises(ValueError, match=r"already quantized by compressed-tensors.*dequant"):
            get_metis_model(model, MetisConfig(target_modules=targets))
    assert not list(metis_layers(model))


@reads_packed
def test_dequantized_it_is_a_dense_model(checkpoint):
    model = get_metis_model(dense_twin(checkpoint, torch.float32), MetisConfig(scheme="nvfp4"))
    assert len(list(metis_layers(model))) == 14


class OtherParameter(nn.Parameter):
    """A weight of another library."""


def stored(weight) -> nn.Linear:
    layer = nn.Linear(32, 32)
    layer.weight = weight
    return layer


def packed() -> nn.Linear:
    layer = nn.Linear(32, 32)
    del layer.weight
    layer.register_buffer("weight_packed", torch.zeros(32, 16, dtype=torch.uint8))
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: stored(nn.Parameter(torch.ones(32, 32).to(torch.float8_e4m3fn), False)),
            "in float8_e4m3fn",
        ),
        (
            lambda: stored(OtherParameter(torch.ones(32, 32))),
            "a OtherParameter, which another library manages",
        ),
        (packed, "has weight_packed besides weight and bias"),
    ],
)
def test_a_single_layer_is_skipped(make, reason):
    model = nn.Sequential(make(), nn.Linear(32, 32))
    first = model[0]
    get_metis_model(model, MetisConfig(scheme="nvfp4"))
    assert model[0] is first
    assert reason in model.metis_report.skipped["0"]
    assert [name for name, _ in metis_layers(model)] == ["1"]
    assert model.metis_report.flops_share == 0.5


def test_experts_of_another_type_are_skipped():
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), False)
    get_metis_model(model, MetisConfig(scheme="nvfp4"))
    reason = model.metis_report.skipped["model.layers.0.mlp.experts.down_proj"]
    assert reason == "its weight is stored in float8_e4m3fn"
