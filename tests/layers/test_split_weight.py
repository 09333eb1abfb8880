"""`split_weight` under any scheme."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import llama
from safetensors.torch import load_model, save_model
from tensors import assert_same
from torch import nn
from transformers.pytorch_utils import Conv1D

from layers.layer_tools import DEPLOYED, FP4_SCHEMES, layer_of, of_each_kind
from metis_hf import (
    MetisConfig,
    MetisLinear,
    QuantLinear,
    get_metis_model,
    metis_layers,
    refresh,
    scheme_names,
)
from metis_hf.layers.make import convert_linear
from metis_hf.schemes import Role, build_scheme

BESIDE = {"metis-released", "mean-released"}  # factors in a branch of their own
SPLIT_BY_THEMSELVES = {"bf16-split", "metis-paper", "svdquant", *BESIDE}
TOKENS, IN, OUT = 40, 64, 48


def test_form():
    """None is the scheme's own choice; True and False are what they say."""
    for scheme in scheme_names():
        own = scheme in SPLIT_BY_THEMSELVES
        choices = [(None, own), (False, False), (True, True)]
        for split, expected in choices[: 2 if scheme in DEPLOYED else 3]:
            _, layer = layer_of(scheme, split_weight=split)
            assert type(layer) is (MetisLinear if expected else QuantLinear)
            assert layer.scheme.weight.is_split is expected
        if own and scheme not in BESIDE:
            config = MetisConfig(scheme=scheme)
            same = build_scheme(config.replace(split_weight=True), IN, OUT)
            assert same == build_scheme(config, IN, OUT)  # in the units of the scheme too
        elif scheme not in DEPLOYED:
            assert layer.weight_form.compensated
            torch.testing.assert_close(layer.u.square().mean(), torch.tensor(1.0))


# The clipping of `omniquant` is another form of the weight.
@pytest.mark.parametrize("scheme", [name for name in FP4_SCHEMES if name != "omniquant"])
def test_a_side_branch_stands_beside_the_layer_of_the_residual(scheme):
    """The layer of the residual and two plain ones, in outputs and gradients."""
    torch.manual_seed(0)
    x, dy = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    _, layer = layer_of(scheme, split_weight="side-branch", i=IN, o=OUT)
    alone = nn.Linear(IN, OUT)
    alone.weight.data, alone.bias.data = layer.weight_residual.data.clone(), layer.bias.data.clone()
    config = MetisConfig(scheme=scheme, split_weight=False)
    alone = convert_linear(alone, config, name="layer").train()
    u, s, vh = (p.detach().clone().requires_grad_() for p in (layer.u, layer.s, layer.vh))

    def branch(read):
        return nn.functional.linear(nn.functional.linear(read, vh) * s, u)

    found, expected = (x.clone().requires_grad_() for _ in range(2))
    y = layer(found)
    exact = alone(expected) + branch(expected)
    assert torch.equal(y, exact)
    y.backward(dy)
    exact.backward(dy)
    torch.testing.assert_close(found.grad, expected.grad)
    assert torch.equal(layer.weight_residual.grad, alone.weight.grad)
    for name, factor in (("u", u), ("s", s), ("vh", vh)):
        torch.testing.assert_close(getattr(layer, name).grad, factor.grad)


@pytest.mark.parametrize("scheme", sorted(BESIDE))
def test_each_part_of_a_released_scheme_can_be_left_out(scheme):
    def parts(*decompose):
        built = build_scheme(MetisConfig(scheme=scheme, decompose=decompose), IN, OUT)
        operands = built.fprop_input, built.dgrad_grad_output
        return [built.weight.is_split, *(not each.conditioner.is_direct for each in operands)]

    assert parts("weight", "activation", "gradient") == [True, True, True]
    assert parts("activation") == [False, True, False]
    assert parts("gradient") == [False, False, True]
    assert parts("weight") == [True, False, False]


def test_deployed_layers_have_no_side_branch():
    with pytest.raises(ValueError, match="split_weight='side-branch' stores factors"):
        layer_of("w4a4", split_weight="side-branch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", scheme_names())
def test_tensors_fill_their_storages(scheme, dtype, tmp_path):
    """Parameters and state: safetensors and accelerate refuse to load views of larger storages."""
    for split in (None,) if scheme in DEPLOYED else (None, True):
        for linear in (nn.Linear(IN, OUT, dtype=dtype), Conv1D(OUT, IN).to(dtype)):
            config = MetisConfig(scheme=scheme, split_weight=split, rank=8 if split else None)
            layer = convert_linear(linear, config, name="layer")
            for _ in range(2):  # as converted, and after a call
                state = layer.state_dict()
                for tensor in state.values():
                    assert tensor.is_contiguous()
                    assert tensor.untyped_storage().nbytes() == tensor.nbytes
                assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
                save_model(layer, tmp_path / "layer.safetensors")
                assert load_model(layer, tmp_path / "layer.safetensors") == (set(), [])
                layer.train()(torch.randn(TOKENS, IN, dtype=dtype))


@pytest.mark.parametrize("scheme", sorted({*of_each_kind(scheme_names())} - DEPLOYED))
def test_saved_and_loaded(scheme, token_ids, tmp_path):
    config = MetisConfig(scheme=scheme, split_weight=scheme not in SPLIT_BY_THEMSELVES)
    assert MetisConfig.from_json(config.to_json()) == config
    model = get_metis_model(llama(), config).eval()
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.quantization_config == config
    split = config.split_weight
    assert all(isinstance(layer, MetisLinear) == split for _, layer in metis_layers(loaded))
    with torch.no_grad():
        assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_bf16_with_a_split_weight_is_bf16_split():
    """To the bit, and metis-paper without one quantizes its dense weight directly."""
    results = []
    for options in ({"scheme": "bf16", "split_weight": True}, {"scheme": "bf16-split"}):
        torch.manual_seed(0)
        _, layer = layer_of(i=IN, o=OUT, rank=8, **options)
        x = torch.randn(TOKENS, IN, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    assert_same(*results)
    dense = build_scheme(MetisConfig(scheme="metis-paper", split_weight=False), IN, OUT)
    others = MetisConfig(scheme="metis-paper", decompose=("activation", "gradient"))
    assert dense.fprop_weight == build_scheme(others, IN, OUT).fprop_weight


def test_storing_the_factors_needs_no_split_of_the_scheme():
    """split_weight wins over `decompose`, in the scheme's own units."""
    for scheme, unit_rms in (("metis", True), ("metis-paper", False)):
        config = MetisConfig(scheme=scheme, decompose=(), split_weight=True)
        built = build_scheme(config, IN, OUT)
        assert built.weight.is_split
        assert (built.weight.unit_rms, built.weight.compensated) == (unit_rms, unit_rms)


def test_other_values_are_refused():
    for value in ("yes", 1, 0, (), "True"):
        with pytest.raises(ValueError, match=r"split_weight=.*expected one of None, True, False"):
            MetisConfig(split_weight=value)


@pytest.mark.parametrize("trained", [("u", "s", "vh"), ("s",)], ids="+".join)
def test_noise_follows_the_factors_that_train(trained):
    """Where the residual is frozen; else thresholds would be the same at every step."""
    _, layer = layer_of("metis-paper", "shared", i=IN, o=OUT, rank=4)
    x = torch.randn(8, IN)
    frozen = [
        name for name, _ in layer.named_parameters() if name.rpartition(".")[2] not in trained
    ]
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    before = layer.call_keys(x)[Role.FPROP_WEIGHT]
    same = layer.call_keys(x)[Role.FPROP_WEIGHT]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name not in frozen:
                parameter.mul_(1.01)
    after = layer.call_keys(x)[Role.FPROP_WEIGHT]
    assert "weight_residual" in frozen
    assert before.data == same.data != after.data


def test_a_weight_that_changes_is_split_by_another_sketch():
    """So that rounding errors average out over steps; the same bits are split alike."""
    _, layer = layer_of("metis", i=256, o=256, rank=8, decompose=("weight",))
    x, w = torch.randn(4, 256), layer.weight.detach()  # no gap in its spectrum: the sketch decides
    conditioner = layer.scheme.fprop_weight.conditioner
    keys = [layer.call_keys(x, weight)[Role.FPROP_WEIGHT] for weight in (w, w * 1.01, w.clone())]
    bases = [conditioner.split(w, key=key)[2] for key in keys]
    assert not torch.equal(bases[0], bases[1])
    assert torch.equal(bases[0], bases[2])


def off(model: nn.Module, w: torch.Tensor) -> float:
    """Distance of the represented weight, summed up in fp64, from w; relative."""
    _, layer = next(metis_layers(model))
    u, s, vh, residual = (p.detach().double() for p in layer.weight_params())
    found = (u * s * layer.weight_form.gain) @ vh + residual
    return ((found - w).norm() / w.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["metis", "metis-paper"])
def test_only_the_residual_is_rounded(scheme, dtype) -> None:
    """At conversion and at each refresh: the residual holds what rounding took off the factors."""
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
