"""Statistics of tensors at the ends of what fp32 holds, and of zeros."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import llama
from design import some_slow

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer, sqnr_db
from metis_hf.schemes import Role
from metis_hf.training.health import (
    LayerProbe,
    element_fates,
    group_means,
    nonfinite_layers,
    operand_health,
    plan_of_call,
    spectral_norm,
    split_health,
    stable_rank,
    weight_health,
)
from training.trainer_tools import converted

NORM_TOLERANCE = 0.05  # of twelve power iterations on normal entries, whose spectrum has no gap


@pytest.mark.parametrize("factor", [1e-20, 1e30])
def test_size_of_a_tensor_does_not_matter(factor):
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.svdvals(x.double()).max().item() * factor
    assert spectral_norm(x * factor).item() == pytest.approx(exact, rel=NORM_TOLERANCE)
    assert stable_rank(x * factor).item() == pytest.approx(stable_rank(x).item(), rel=1e-3)


def converted_layer(scheme="metis", **changes):
    return next(layer for _, layer in metis_layers(converted(scheme, rank=8, **changes)))


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


@pytest.mark.parametrize(("scheme", "rows"), [("metis", 1), ("nvfp4-rne", 8)])
def test_a_split_that_keeps_everything_narrows_nothing(scheme, rows):
    """As of an expert with few tokens, among rows of zeros: the residual is rounding of fp32."""
    layer = converted_layer(scheme)
    operand = layer.active_scheme().fprop_input
    x = torch.zeros(48, 64)
    x[:rows] = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    found = operand_health(x, operand, rank=8, key=Key(0))
    assert {"energy", "narrowing"}.isdisjoint(found)
    assert {"stable_rank", "sqnr_db", "zeroed", "saturated"} <= found.keys()
    x[rows:16] = torch.randn(16 - rows, 64, generator=torch.Generator().manual_seed(1))
    found = operand_health(x, operand, rank=8, key=Key(0))
    assert 1 < found["narrowing"] < 10
    assert 0 < found["energy"] < 1


def test_a_weight_of_full_rank_has_no_residual():
    layer = converted_layer()
    assert weight_health(layer).keys() >= {"energy", "narrowing"}
    torch.nn.init.zeros_(layer.weight[8:])
    assert {"energy", "narrowing"}.isdisjoint(weight_health(layer))


def test_no_rows_have_no_statistics():
    """A mean that contains NaN is NaN: an expert without a token must not be in it."""
    operand = converted_layer().active_scheme().fprop_input
    assert operand_health(torch.zeros(0, 64), operand, rank=8, key=Key(0)) == {}


def test_the_call_that_has_rows_is_measured():
    """Experts are called in turn, and the first call may have no token."""
    layer = converted_layer().train()
    probe = LayerProbe()
    probe.attach({"expert": layer})
    for rows in (0, 32):
        layer(torch.ones(rows, 64).cumsum(0).requires_grad_()).sum().backward()
    assert {"activation", "gradient"} <= probe.stats["expert"].keys()
    assert probe.stats["expert"]["activation"]["nonfinite"] == 0


MEASURED = ["nvfp4-rne", "quarot", "quip", "hot-channel", "smoothquant",
            "outlier-suppression-plus", "svdquant", "metis"]  # fmt: skip


@pytest.mark.parametrize("scheme", some_slow(MEASURED, ["quip", "outlier-suppression-plus"]))
def test_weight_is_measured_as_its_gemm_gets_it(scheme):
    """Rotated, scaled by what the layer has seen, split, or with a second term."""
    model = llama(num_hidden_layers=1)
    with torch.no_grad():  # outliers in what up_proj reads
        model.model.layers[0].post_attention_layernorm.weight[::16] = 60.0
    get_metis_model(model, MetisConfig(scheme=scheme))
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    layers, probe = dict(metis_layers(model)), LayerProbe()
    layer = layers[next(name for name in layers if name.endswith("up_proj"))]
    inputs = []
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for _ in range(2):
        probe.attach(layers)
        model.train()(input_ids=ids, labels=ids).loss.backward()
    plan = plan_of_call(layer, inputs[-1], None, torch.float32)
    params = layer.weight_params()
    with torch.no_grad():
        w_hat = plan.weight_operand(Role.FPROP_WEIGHT, params)
        values = w_hat.values if w_hat.scale is None else w_hat.values * w_hat.scale
        weight = layer.weight_form.dense(params).float()
        name = next(name for name, one in layers.items() if one is layer)
        found = weight_health(layer, probe.states.get(name))
    exact = sqnr_db(weight, values[: weight.shape[0], : weight.shape[1]].float()).item()
    assert found["sqnr_db"] == pytest.approx(exact, abs=0.05)
    assert found["zeroed"] < 0.3  # of normal entries a fifteenth, scaled apart a fifth


def test_the_likely_origin_of_nan_comes_first():
    """Gradients run from the last layer to the first: the last one that has NaN made it."""
    bad, good = {"nonfinite": 0.5}, {"nonfinite": 0.0}
    measured = {
        "first": {"activation": good, "gradient": bad, "weight": bad},
        "second": {"activation": good, "gradient": bad, "weight": good},
        "third": {"activation": bad, "weight": good},
    }
    names = ["third (activation)", "second (gradient)", "first (gradient)", "first (weight)"]
    assert nonfinite_layers(measured) == names


def test_a_mean_that_contains_nan_is_nan():
    """An expert without a token has no statistics, and is in no mean."""
    measured = {
        "l.0.q": {"weight": {"nonfinite": 0.5}, "activation": {}},
        "l.1.q": {"weight": {"nonfinite": 0.0, "sqnr_db": 20.0}, "activation": {"sqnr_db": 18.0}},
        "l.1.k": {"weight": {"nonfinite": 0.0, "sqnr_db": 21.0}},
    }
    means = group_means(measured)
    assert math.isnan(means.pop("weight/q/sqnr_db"))
    assert means == {
        "weight/q/nonfinite": 0.25,
        "activation/q/sqnr_db": 18.0,
        "weight/k/nonfinite": 0.0,
        "weight/k/sqnr_db": 21.0,
    }


def test_layers_of_a_sequential_have_their_whole_name():
    means = group_means({"0": {"weight": {"a": 1.0}}, "1.2": {"weight": {"a": 2.0}}})
    assert means == {"weight/0/a": 1.0, "weight/1.2/a": 2.0}


def test_zeros_are_not_lost_elements():
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, 0.1, -0.1, 1.0])  # under a scale of 1 codes are halves apart
    zeroed, _ = element_fates(x, Quantizer())
    assert zeroed == 0.5


@pytest.mark.parametrize("factor", ["u", "vh"])
def test_either_factor_may_have_drifted(factor):
    layer = converted_layer("metis-paper", split_weight=True)
    assert split_health(layer)["orthogonality"] < 1e-5
    getattr(layer, factor).data.mul_(1.1)
    assert split_health(layer)["orthogonality"] == pytest.approx(0.21, abs=1e-3)
