"""`outer_scale="token"`: one fp32 scale for each token of x and dy, one for the weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from conftest import llama
from reference import fake_quantize as reference

from layers.layer_tools import (
    FP4_SCHEME_MODES,
    NEAREST,
    layer_of,
    of_each_structure,
    record,
)
from metis_hf import MetisConfig, get_metis_model, set_precision
from metis_hf.layers import native
from metis_hf.layers.tensor_parallel import COLWISE, ROWWISE, WHOLE, Shards, obstacle
from metis_hf.numerics.scaling import OuterScale
from metis_hf.operands import Quantized
from metis_hf.schemes import Role, build_scheme
from metis_hf.training.resume import ResumeGuard

WITHOUT = {"mxfp4", "mxfp4-hadamard", "ufp4"}  # no scale above those of blocks
TAKE_IT = of_each_structure(pair for pair in FP4_SCHEME_MODES if pair[0] not in WITHOUT)
TOKENS, IN, OUT = 37, 48, 32
WEIGHTS = (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)


def data(scheme="nvfp4-rne", mode=None, dtype=torch.float32, **changes):
    """(layer, x, dy): tokens of sizes from 1e-4 to 1e4, which one tensor scale does not hold."""
    torch.manual_seed(0)
    _, layer = layer_of(scheme, mode, i=IN, o=OUT, bias=False, dtype=dtype, **changes)
    x = torch.randn(TOKENS, IN) * torch.logspace(-4, 4, TOKENS)[:, None]
    dy = torch.randn(TOKENS, OUT) * torch.logspace(3, -3, TOKENS)[:, None]
    return layer, x.to(dtype).requires_grad_(), dy.to(dtype)


def by_token(x: np.ndarray) -> np.ndarray:
    return np.stack([reference(row).values for row in x]).astype(np.float64)


@pytest.mark.parametrize("mode", ["shared", "contraction"])
def test_results_are_those_of_tokens_quantized_alone(mode):
    """y and dx by token; dw of the very copies (shared), or of copies under one tensor scale."""
    layer, x, dy = data(mode=mode, outer_scale="token", scale_rounding="nearest", **NEAREST)
    y = layer(x)
    y.backward(dy)
    x64, dy64, w = (t.detach().numpy() for t in (x, dy, layer.weight))
    tile = "square" if mode == "contraction" else "row"
    x_hat, dy_hat = by_token(x64), by_token(dy64)
    w_hat = reference(w, tile=tile).values.astype(np.float64)
    wide = np.abs(x_hat) @ np.abs(w_hat).T
    assert (np.abs(y.detach().numpy() - x_hat @ w_hat.T) <= 1e-5 * wide).all()
    wide = np.abs(dy_hat) @ np.abs(w_hat)
    assert (np.abs(x.grad.numpy() - dy_hat @ w_hat) <= 1e-5 * wide).all()
    if mode == "contraction":
        x_hat, dy_hat = (reference(t, dim=0).values.astype(np.float64) for t in (x64, dy64))
    wide = np.abs(dy_hat).T @ np.abs(x_hat)
    assert (np.abs(layer.weight.grad.numpy() - dy_hat.T @ x_hat) <= 1e-5 * wide).all()


@pytest.mark.parametrize("mode", ["shared", "contraction"])
def test_in_bf16_the_scale_of_a_token_is_taken_out_of_the_gemm(mode):
    """It multiplies rows of the output in fp32's precision; along wgrad's sum it cannot."""
    layer, x, dy = data(mode=mode, dtype=torch.bfloat16, outer_scale="token", **NEAREST)
    plan_scheme = layer.scheme
    quantizer = plan_scheme.fprop_input.quantizer
    values, scale = quantizer.unscaled(x, dtype=torch.bfloat16)
    weight = plan_scheme.fprop_weight.quantizer
    w_values, w_scale = weight.unscaled(layer.weight, dtype=torch.bfloat16)
    y = layer(x)
    wanted = (values @ w_values.T).mul_(scale * w_scale)
    assert torch.equal(y, wanted)
    assert scale.shape == (TOKENS, 1)
    y.backward(dy)
    assert layer.weight.grad.isfinite().all()
    copies = Quantized(values, scale)
    assert copies.factored(1) is copies
    folded = copies.transposed().factored(1)
    assert folded.scale is None
    assert torch.equal(folded.values, (values * scale).to(torch.bfloat16).T)
    one = Quantized(values, w_scale)
    assert one.transposed().factored(1).scale is w_scale


@pytest.mark.parametrize(("scheme", "mode"), TAKE_IT)
def test_every_scheme_with_two_levels_takes_it(scheme, mode):
    """Inputs and gradients by token where their blocks are tokens', weights by the tensor."""
    layer, x, dy = data(scheme, mode, outer_scale="token")
    calls = record(layer)
    layer(x).backward(dy)
    for parameter in layer.parameters():
        assert parameter.grad.isfinite().all()
    for role in Role:
        source, operand = layer.scheme.resolve(role)
        wanted = OuterScale.TENSOR if source in WEIGHTS else OuterScale.TOKEN
        assert operand.quantizer.quantizer.outer_scale is wanted, role
    plain, x2, dy2 = data(scheme, mode)
    before = record(plain)
    plain(x2).backward(dy2)
    assert len(calls) == len(before)
    changed = [not torch.equal(a.after, b.after) for a, b in zip(calls, before)]
    tokens = [call.before.shape[0] == TOKENS and call.dim % 2 == 1 for call in calls]
    assert any(c for c, token in zip(changed, tokens) if token)
    assert not torch.equal(layer(x), plain(x2))


@pytest.mark.parametrize("scheme", ["metis", "quartet2", "if4"])
def test_recomputed_and_saved_passes_agree(scheme):
    """What is saved of x holds it exactly: gradients are those of activation checkpointing."""
    layer, x, dy = data(scheme, outer_scale="token")
    layer(x).backward(dy)
    kept = [p.grad.clone() for p in layer.parameters()] + [x.grad.clone()]
    fresh, x2, dy2 = data(scheme, outer_scale="token")
    torch.utils.checkpoint.checkpoint(fresh, x2, use_reentrant=False).backward(dy2)
    again = [p.grad for p in fresh.parameters()] + [x2.grad]
    assert all(torch.equal(a, b) for a, b in zip(kept, again))


def test_a_token_does_not_depend_on_the_others():
    """Rounded to nearest a token's output is the same alone and in a batch; not so by tensor."""
    for outer, same in (("token", True), ("tensor", False)):
        layer, x, _ = data(outer_scale=outer, **NEAREST)
        with torch.no_grad():
            beside, alone = layer(x)[4:5], layer(x[4:5])
            error = (beside - alone).norm() / alone.norm()
            assert (error < 1e-6) == same  # a GEMM may add in another order
            assert (error > 0.01) != same


class TestRefusals:
    def test_schemes(self):
        reasons = dict.fromkeys(WITHOUT, "has none above them")
        reasons |= {"w4a4": "static scale", "w4a16": "neither inputs nor output gradients"}
        for scheme, reason in reasons.items():
            message = f"scheme '{scheme}' does not take outer_scale=\"token\".*{reason}"
            with pytest.raises(ValueError, match=message):
                build_scheme(MetisConfig(scheme=scheme, outer_scale="token"), 64, 64)
        config = MetisConfig(scheme="nvfp4", outer_scale="token", format="mxfp4")
        with pytest.raises(ValueError, match="e8m0 block scales mxfp4 has none"):
            build_scheme(config, 64, 64)

    def test_one_level(self):
        with pytest.warns(UserWarning, match="two_level"):
            config = MetisConfig(scheme="nvfp4", outer_scale="token", two_level=False)
        with pytest.raises(ValueError, match="two_level=False nvfp4 has none"):
            build_scheme(config, 64, 64)

    def test_another_word(self):
        with pytest.raises(ValueError, match=r"outer_scale='row'; expected one of.*tensor.*token"):
            MetisConfig(outer_scale="row")

    def test_fp4_units(self):
        scheme = build_scheme(MetisConfig(scheme="nvidia", outer_scale="token"), 64, 64)
        reason = native.obstacle(scheme)
        assert reason == (
            "fprop takes its input with one scale per token, but FP4 units take one scale per "
            'tensor; use outer_scale="tensor"'
        )
        assert native.obstacle(build_scheme(MetisConfig(scheme="nvidia"), 64, 64)) is None
        backward = MetisConfig(
            scheme="nvidia", outer_scale="token", high_precision=("forward",), backend="native"
        )
        assert "dgrad takes its grad_output" in native.obstacle(build_scheme(backward, 64, 64))

    @pytest.mark.parametrize(
        ("style", "tensor"), [(COLWISE, "grad_output"), (ROWWISE, "input"), (WHOLE, None)]
    )
    def test_tokens_that_are_cut(self, style, tensor):
        config = MetisConfig(scheme="nvidia", outer_scale="token")
        reason = obstacle(build_scheme(config, 64, 64), Shards(style, 2), (64, 64))
        if tensor is None:
            assert reason is None
        else:
            assert reason.startswith(f"each token of its {tensor} has an outer scale")
            plain = build_scheme(MetisConfig(scheme="nvidia"), 64, 64)
            assert obstacle(plain, Shards(style, 2), (64, 64)) is None


def test_what_quantizes_nothing_is_left_alone():
    """So that `scheme_pattern` can leave single layers in BF16."""
    config = MetisConfig(scheme="bf16")
    token = build_scheme(config.replace(outer_scale="token"), 64, 64)
    assert token == build_scheme(config, 64, 64)


def test_records():
    """Left out where it is one for the tensor: configs written before there was a choice."""
    assert "outer_scale" not in MetisConfig().to_dict()
    chosen = MetisConfig(outer_scale="token")
    assert chosen.to_dict()["outer_scale"] == "token"
    assert MetisConfig.from_json(chosen.to_json()) == chosen
    guard, written = ResumeGuard(), {"trained_config": MetisConfig().to_dict()}
    state = transformers.TrainerState(global_step=1)
    state.stateful_callbacks["ResumeGuard"] = {"attributes": written}
    with pytest.raises(ValueError, match="outer_scale=None -> 'token'"):
        guard.on_train_begin(None, state, None, model=get_metis_model(llama(), chosen))


def test_a_model_trains_and_changes_its_mind(token_ids):
    model = get_metis_model(llama(), MetisConfig(scheme="nvfp4-rne", outer_scale="token"))
    with torch.no_grad():
        first = model.eval()(token_ids).logits
        set_precision(model, outer_scale="tensor")
        second = model(token_ids).logits
    assert not torch.equal(first, second)
    set_precision(model.train(), outer_scale="token")
    model(input_ids=token_ids, labels=token_ids).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.config.quantization_config.outer_scale == "token"
