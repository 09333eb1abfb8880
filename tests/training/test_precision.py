"""Switching the precision of a living model by hand."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import llama
from design import cases
from layers.layer_tools import FP4_SCHEMES
from tensors import logits

from metis_hf import (
    MetisConfig,
    calibrate,
    metis_layers,
    set_precision,
)
from metis_hf.conversion.attention import attention_products
from metis_hf.layers.gemm import GemmPlan
from metis_hf.operands import Quantized
from metis_hf.schemes import Role, Scheme
from metis_hf.training.calibration import scales_are_fixed
from metis_hf.training.precision import CHANGEABLE
from training.trainer_tools import KINDS, converted, up_proj

PASSES = [("forward",), ("backward",), ("forward", "backward")]
# Products of fp32 operands in another order: at most 96 terms of size about 1.
FP32_GEMM = {"rtol": 1e-4, "atol": 96 * torch.finfo(torch.float32).eps}

FORWARD_ROLES = (Role.FPROP_INPUT, Role.FPROP_WEIGHT)
# dgrad contracts rows of w [o i], wgrad the tokens of dy [t o] and x [t i].
CONTRACT_ROWS = (Role.DGRAD_WEIGHT, Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT)


@cases({"scheme": FP4_SCHEMES}, rotated={"passes": PASSES})
def test_each_gemm_after_the_switch(scheme, passes):
    """The three GEMMs, each multiplied here from operands made one by one.

    A pass in high precision multiplies the very tensors, with the weight that the layer represents;
    the other pass multiplies what the scheme's quantizers give, as before the switch. How a weight
    that forward quantizes gets its gradient from dL/dW_hat is no GEMM, and stays.
    """
    model = converted(scheme).train()
    layer = up_proj(model)
    scheme_before = layer.scheme
    if "weight_clip" in layer.weight_form.names:
        layer.weight_clip.data.fill_(40)  # a strength of 1: the weight's gradient is dL/dW
    set_precision(model, high_precision=passes)
    x = torch.randn(40, 64, requires_grad=True)
    dy = torch.randn(40, 96)
    y = layer(x)
    y.backward(dy)

    stored = tuple(p.detach() for p in layer.weight_params())
    form, params = layer.weight_form.in_gemm(stored)  # a branch beside the GEMM is never quantized
    read = x.detach().requires_grad_()
    if (branch := layer.weight_form.beside(read, stored)) is not None:
        branch.backward(dy)
        y, x.grad = y - branch, x.grad - read.grad
    keys = layer.call_keys(x)
    state = layer.call_state(x, keys)
    plan = GemmPlan(scheme_before, form, torch.float32, keys, state=state)

    def operand(role, exact):
        """[t c] or [o i]: exact, or quantized by the scheme for this very GEMM.

        What the backward pass shared with the forward pass it now quantizes for itself, with blocks
        along the dimension that it contracts; the two backward GEMMs share dy as before.
        """
        if ("forward" if role in FORWARD_ROLES else "backward") in passes:
            return Quantized(exact)
        if role is Role.WGRAD_GRAD_OUTPUT:
            role, _ = scheme_before.resolve(role)
        options = {"dim": 0 if role in CONTRACT_ROWS else -1, "key": keys[role]}
        quantizer = plan.resolve(role)[1]
        if role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT):
            return form.quantize(params, quantizer, dtype=torch.float32, **options)
        return quantizer(exact, dtype=torch.float32, **options)

    w, x_ = form.dense(params), x.detach()
    hats = {role: operand(role, m) for role, m in zip(Role, (x_, w, dy, w, dy, x_), strict=True)}

    def without_exact(name):
        return plan if name not in passes else dataclasses.replace(plan, scheme=Scheme())

    forward, backward = without_exact("forward"), without_exact("backward")
    fprop = forward.fprop(x_, hats[Role.FPROP_INPUT], params, hats[Role.FPROP_WEIGHT])
    dgrad = backward.dgrad(dy, hats[Role.DGRAD_GRAD_OUTPUT], params, hats[Role.DGRAD_WEIGHT])
    wgrad = backward.wgrad(dy, hats[Role.WGRAD_GRAD_OUTPUT], hats[Role.WGRAD_INPUT])
    estimator = layer.scheme.fprop_weight  # quantizes nothing where forward is in high precision
    slope = estimator.conditioner.weight_gradient(torch.ones_like(w), w, estimator.quantizer)
    torch.testing.assert_close(y.detach(), fprop, **FP32_GEMM)
    torch.testing.assert_close(x.grad, dgrad, **FP32_GEMM)
    # The last stored tensor is the dense weight or the residual, whose gradient is dL/dW.
    torch.testing.assert_close(layer.weight_params()[-1].grad, wgrad * slope, **FP32_GEMM)
    exact = {"fprop": x_ @ w.T, "dgrad": dy @ w, "wgrad": dy.T @ x_ * slope}
    for name, (got, high) in {
        "fprop": (y.detach(), "forward" in passes),
        "dgrad": (x.grad, "backward" in passes),
        "wgrad": (layer.weight_params()[-1].grad, "backward" in passes),
    }.items():
        error = ((got - exact[name]).norm() / exact[name].norm()).item()
        # FP4 with nearest rounding leaves errors of some percent; fp32 of 1e-6.
        assert error < 1e-5 if high else error > 1e-2, (name, error)


@pytest.mark.parametrize("scheme", KINDS)
def test_switching_back_is_exact(scheme, token_ids):
    model = converted(scheme).train()

    def loss_and_grads():
        model.zero_grad()
        loss = model(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    before = loss_and_grads()
    set_precision(model, high_precision=("forward", "backward"))
    high = loss_and_grads()
    set_precision(model, high_precision=())
    assert all(torch.equal(a, b) for a, b in zip(before, loss_and_grads()))
    same = all(torch.equal(a, b) for a, b in zip(before, high))
    assert same == scheme.startswith("bf16")


@pytest.mark.parametrize("scheme", KINDS)
def test_saved_config_is_restored(scheme, token_ids, tmp_path):
    model = converted(scheme)
    set_precision(model, high_precision=("forward",), backward_rounding="nearest")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.quantization_config == model.config.quantization_config
    results = []
    for each in (model, loaded):
        each.train()
        loss = each(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_evaluation_in_high_precision(token_ids):
    """A model is evaluated unquantized, and trains on as if nothing had been."""
    model = converted("metis").eval()
    dense = copy.deepcopy(model)
    set_precision(model, high_precision=("forward", "backward"))
    high = logits(model, token_ids)
    set_precision(model, high_precision=())
    quantized = logits(model, token_ids)
    set_precision(dense, high_precision=("forward",))
    forward_only = logits(dense, token_ids)
    torch.testing.assert_close(high, forward_only, rtol=0, atol=1e-5)
    assert (quantized - high).abs().max() > 1e-3


@pytest.mark.parametrize("split", [False, True])
def test_another_scheme_of_the_same_form(split, token_ids, tmp_path):
    """Any scheme takes over from any other, with the parameters that there are."""
    model = converted("metis", split_weight=split)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for other in ("bf16", "nvidia"):
        set_precision(model, scheme=other)
        expected = converted(other, split_weight=split)
        expected.load_state_dict(model.state_dict())
        _same_logits(model, expected, token_ids)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        model.save_pretrained(tmp_path / other)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / other)
        _same_logits(model, loaded, token_ids)


def _same_logits(a, b, ids):
    assert torch.equal(logits(a, ids), logits(b, ids))


class TestErrors:
    """Each leaves every layer and the config as they were."""

    @staticmethod
    def refused(model, match, **changes):
        before = [(layer.config, layer.scheme) for _, layer in metis_layers(model)]
        config = model.config.quantization_config
        with pytest.raises(ValueError, match=match):
            set_precision(model, **changes)
        after = [(layer.config, layer.scheme) for _, layer in metis_layers(model)]
        assert after == before
        assert model.config.quantization_config is config

    def test_plain_model(self):
        with pytest.raises(ValueError, match="no Metis layer; call get_metis_model"):
            set_precision(llama(), high_precision=("forward",))

    @pytest.mark.parametrize(
        ("scheme", "other"),
        [
            ("bf16-split", "nvidia"),
            ("bf16-split", "metis-paper"),
            ("metis-paper", "metis"),
            ("bf16", "bf16-split"),
        ],
    )
    def test_scheme_of_another_form(self, scheme, other):
        self.refused(converted(scheme), "stores weights in a different form", scheme=other)

    def test_what_decides_the_parameters(self):
        model = converted()
        config = model.config.quantization_config
        for name in {f.name for f in dataclasses.fields(MetisConfig)} - set(CHANGEABLE):
            match = rf"^{name} cannot change after conversion"
            self.refused(model, match, **{name: getattr(config, name)})

    def test_unknown_field(self):
        self.refused(converted(), "precision cannot change after conversion", precision="bf16")

    def test_value_out_of_range(self):
        self.refused(converted(), r"high_precision=\('sideways',\)", high_precision=("sideways",))

    def test_layers_with_schemes_of_their_own(self, tmp_path, token_ids):
        model = converted("nvidia", scheme_pattern={"down_proj": "nvfp4"})
        self.refused(model, r"give both scheme=\.\.\. and scheme_pattern=\{\}", scheme="bf16")
        self.refused(model, "give both", scheme_pattern={})
        self.refused(
            model, "can only be emptied", scheme="bf16", scheme_pattern={"up_proj": "nvfp4"}
        )
        set_precision(model, high_precision=("forward",))  # each keeps its own scheme
        assert {layer.config.scheme for _, layer in metis_layers(model)} == {"nvidia", "nvfp4"}
        set_precision(model, scheme="bf16", scheme_pattern={}, high_precision=())
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert {layer.config.scheme for _, layer in metis_layers(loaded)} == {"bf16"}
        _same_logits(model, loaded, token_ids)


def test_calibrated_scales_that_go_are_named(caplog):
    model = converted("w4a4")
    set_precision(model, scheme="nvfp4")  # nothing was noted yet
    set_precision(model, scheme="w4a4")
    calibrate(model, [torch.arange(16)[None]])
    set_precision(model, high_precision=("backward",))
    set_precision(model, scheme="w4a16")  # has the same scales
    assert not caplog.text
    set_precision(model, scheme="nvfp4")
    assert "'nvfp4' does not keep input_amax, scales_frozen, weight_amax" in caplog.text
    assert "7 layers lost their values (the first is model.layers.0.self_attn.q_proj" in caplog.text
    assert "calibrate again if you switch back" in caplog.text
    set_precision(model, scheme="w4a4")
    assert not scales_are_fixed(model)


def test_the_report_follows():
    model = converted("nvfp4")
    before = model.metis_report
    set_precision(model, scheme="metis")
    assert model.metis_report == converted("metis").metis_report != before
    set_precision(model, scheme="nvfp4")
    assert model.metis_report == before


@pytest.mark.parametrize("scheme", ["w4a4", "w4a16"])
def test_a_deployed_layer_in_high_precision_is_the_plain_one(scheme):
    """Its backward pass multiplies what forward does: nothing that forward did not quantize."""
    model = converted(scheme).train()
    layer = up_proj(model)
    set_precision(model, high_precision=("forward",))
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 96)
    found = torch.autograd.grad(layer(x), [x, layer.weight], dy)
    wanted = torch.autograd.grad(F.linear(x, layer.weight), [x, layer.weight], dy)
    for own, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, exact, **FP32_GEMM)


def test_clipping_takes_the_blocks_of_another_format():
    """Its parameters do not depend on them."""
    model = converted("omniquant")
    layer = up_proj(model)
    set_precision(model, format="mxfp4")
    assert layer.weight_form.block == 32
    assert torch.isfinite(layer(torch.randn(4, 64))).all()
    set_precision(model, format=None)
    assert layer.weight_form.block == 16


def test_the_config_inside_a_wrapper_changes_too():
    """As under DistributedDataParallel, whose module has the config that is saved."""
    model = converted("nvfp4")
    set_precision(torch.nn.ModuleDict({"module": model}), scheme="nvidia")
    assert model.config.quantization_config.scheme == "nvidia"
    assert model.metis_report.scheme == "nvidia"


def test_parts_keep_their_own_attention():
    plain, quantized = converted("nvfp4"), converted("nvfp4", attention="nvfp4")
    both = torch.nn.ModuleList([plain, quantized])
    set_precision(both, high_precision=("forward",))
    assert [len(list(attention_products(part))) for part in both] == [0, 1]
    for part, attention in zip(both, (None, "nvfp4"), strict=True):
        config = part.config.quantization_config
        assert (config.high_precision, config.attention) == (("forward",), attention)
