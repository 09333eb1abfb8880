"""`split_weight` under any scheme."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import llama

from layers.layer_tools import DEPLOYED, layer_of, of_each_kind, with_exact_quantizers
from metis_hf import (
    MetisConfig,
    MetisLinear,
    QuantLinear,
    get_metis_model,
    metis_layers,
    scheme_names,
)
from metis_hf.schemes import Role, build_scheme

SPLIT_BY_THEMSELVES = {"bf16-split", "metis-paper", "svdquant"}
TOKENS, IN, OUT = 40, 64, 48
FLOAT64_TOLERANCE = 1e-12  # sums of at most 64 terms near 1, some of them split in three


@pytest.mark.parametrize("scheme", scheme_names())
class TestEveryScheme:
    def test_form(self, scheme):
        """None is the scheme's own choice; True and False are what they say."""
        own = scheme in SPLIT_BY_THEMSELVES
        choices = [(None, own), (False, False), (True, True)]
        for split, expected in choices[: 2 if scheme in DEPLOYED else 3]:
            _, layer = layer_of(scheme, split_weight=split)
            assert type(layer) is (MetisLinear if expected else QuantLinear)
            assert layer.scheme.weight.is_split is expected
        if own:
            config = MetisConfig(scheme=scheme)
            same = build_scheme(config.replace(split_weight=True), IN, OUT)
            assert same == build_scheme(config, IN, OUT)  # in the units of the scheme too
        elif scheme not in DEPLOYED:
            assert layer.weight_form.compensated
            torch.testing.assert_close(layer.u.square().mean(), torch.tensor(1.0))

    def test_exact_quantizers_give_a_linear_layer(self, scheme):
        """Also: what corrects an input adds nothing where no input has an error."""
        for split in (False, True)[: 1 if scheme in DEPLOYED else 2]:
            self.assert_linear(scheme, split)

    @staticmethod
    def assert_linear(scheme, split):
        double = {"dtype": torch.float64}
        linear, layer = layer_of(scheme, i=IN, o=OUT, split_weight=split, **double)
        if "weight_clip" in layer.weight_form.names:
            layer.weight_clip.data.fill_(40)  # a strength of 1: nothing is clipped
        layer.scheme = with_exact_quantizers(layer.scheme)
        x, dy = torch.randn(TOKENS, IN, **double), torch.randn(TOKENS, OUT, **double)
        results = []
        for module in (linear, layer):
            x_ = x.clone().requires_grad_()
            y = module(x_)
            y.backward(dy)
            weight = getattr(module, "weight_residual", None) if split else module.weight
            weight = module.weight if weight is None else weight
            results.append((y.detach(), x_.grad, weight.grad))
        for expected, found in zip(*results):
            error = (found - expected).abs().max() / expected.abs().max()
            assert error < FLOAT64_TOLERANCE


@pytest.mark.parametrize(
    ("scheme", "split"),
    [
        (scheme, split)
        for scheme in of_each_kind(scheme_names())
        for split in (True, False)
        if not (split and scheme in DEPLOYED)
    ],
)
def test_saved_and_loaded(scheme, split, token_ids, tmp_path):
    config = MetisConfig(scheme=scheme, split_weight=split)
    assert MetisConfig.from_json(config.to_json()) == config
    model = get_metis_model(llama(), config).eval()
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.quantization_config == config
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
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
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


@pytest.mark.parametrize("value", ["yes", 1, 0, (), "True"])
def test_other_values_are_refused(value):
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
