"""Fused experts of mixture-of-experts models: coverage, numerics, gradients, and the way back."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import mixtral
from conversion.architectures import ARCHITECTURES, EXPERTS, causal_batch
from design import cases
from tensors import relative_error
from torch import nn
from training.trainer_tools import records, trainer

from layers.expert_tools import HIDDEN, INNER, KINDS, TOKENS, Block, kinds, routing
from metis_hf import (
    MetisCallback,
    MetisConfig,
    get_metis_model,
    metis_layers,
    to_dense,
)
from metis_hf.numerics import fake_quantize
from metis_hf.training.health import group_means
from metis_hf.training.run_record import HEALTH_FILE

# Relative to the largest value, in fp32: sums of at most INNER terms, or over experts, reordered.
ORDER_TOLERANCE = 2e-6
# Rounding of u s vh + residual, relative to the largest weight.
SPLIT_TOLERANCE = 1e-6
# What one refresh may move of a weight, and so of the logits: fp32 rounding.
REFRESH_TOLERANCE = 1e-5


def fused(block: nn.Module, read) -> dict[str, torch.Tensor]:
    """`read(parameter)` of converted experts, stacked to the shape of the fused parameters."""
    experts, stacked = block.experts, {}
    for key, layers in experts.named_children():
        if not key.startswith("metis_"):
            continue
        name = key.removeprefix("metis_")
        weights = torch.stack([read(layer.weight) for layer in layers])
        turned = experts.is_transposed and not layers[0].conv1d
        stacked[name] = weights.mT if turned else weights
        if layers[0].bias is not None:
            stacked[f"{name}_bias"] = torch.stack([read(layer.bias) for layer in layers])
    return stacked


@kinds
def test_bf16_is_the_plain_loop_over_experts(kind):
    """Outputs and every gradient, to the order of sums over experts and tokens."""
    plain, block = Block(kind), get_metis_model(Block(kind), MetisConfig(scheme="bf16"))
    results = []
    for each in (plain, block):
        x, index, weights = routing()
        y = each(x, index, weights)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, weights.grad))
    for mine, theirs in zip(results[1], results[0]):
        assert relative_error(mine, theirs) <= ORDER_TOLERANCE
    gradients = fused(block, lambda param: param.grad)
    expected = dict(plain.experts.named_parameters())
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name].grad) <= ORDER_TOLERANCE, name


@kinds
def test_each_expert_quantizes_its_own_tokens_and_weight(kind):
    """NVFP4 to nearest, written out expert by expert; scales know nothing of other experts."""
    plain = Block(kind).experts
    config = MetisConfig(scheme="nvfp4", forward_rounding="nearest")
    block = get_metis_model(Block(kind), config)
    x, index, weights = routing()

    def project(x, name, expert):
        weight = getattr(plain, name)[expert]
        weight = weight.T if plain.is_transposed else weight
        bias = getattr(plain, f"{name}_bias", None)
        # The paper rounds block scales up, so that nothing saturates.
        x, weight = (fake_quantize(v, "nvfp4", scale_rounding="up") for v in (x, weight))
        return F.linear(x, weight, None if bias is None else bias[expert])

    expected = torch.zeros(TOKENS, HIDDEN)
    for expert in range(EXPERTS):
        rows, choice = torch.where(index == expert)
        if plain.has_gate:
            h = plain._apply_gate(project(x[rows], "gate_up_proj", expert))
        else:
            h = plain.act_fn(project(x[rows], "up_proj", expert))
        h = project(h, "down_proj", expert)
        expected[rows] += h * weights[rows, choice, None]
    assert relative_error(block(x, index, weights), expected) <= ORDER_TOLERANCE
    # That it is no trivial comparison: FP4 keeps two or three significant bits.
    exact = Block(kind)(x, index, weights)
    assert relative_error(block(x, index, weights), exact) > 0.02


@pytest.mark.parametrize("scheme", ["bf16", "nvidia", "metis"])
def test_gradients_reach_router_input_and_visited_experts(scheme):
    """An expert without tokens gets zeros, as its slice of the fused weight would.

    Adam's moments then decay alike, and all ranks of DDP and FSDP2 reduce the same parameters.
    """
    block = get_metis_model(Block("mixtral"), MetisConfig(scheme=scheme))
    x, index, weights = routing(experts=2)
    block(x, index, weights).square().sum().backward()
    assert x.grad.abs().max(-1).values.min() > 0  # of every token
    assert weights.grad.abs().min() > 0
    for name, param in block.named_parameters():
        expert = next(int(part) for part in name.split(".") if part.isdigit())
        if expert < 2:
            assert bool(torch.isfinite(param.grad).all()), name
            assert param.grad.abs().max() > 0, name
        else:
            assert torch.equal(param.grad, torch.zeros_like(param)), name


def test_noise_differs_between_experts():
    """Equal weights and equal inputs, and still other stochastic rounding."""
    block = Block("mixtral")
    with torch.no_grad():
        for param in block.experts.parameters():
            param.copy_(param[:1].expand_as(param))
    get_metis_model(block, MetisConfig(scheme="nvfp4"))
    first, second = block.train().experts.metis_down_proj[:2]
    h = torch.randn(8, INNER)
    assert not torch.equal(first(h), second(h))
    block.eval()
    assert torch.equal(first(h), second(h))
    keys = {layer.noise_key() for _, layer in metis_layers(block)}
    assert len(keys) == 2 * EXPERTS


def test_padding_reaches_the_experts():
    """Each expert gets the attention mask of its own tokens, in the order of its rows."""
    model = get_metis_model(ARCHITECTURES["mixtral"].build(), MetisConfig())
    experts = model.model.layers[0].mlp.experts
    seen, routes = {}, []

    def on_experts(module, args):
        routes.append(args[1])

    def on_layer(expert):
        def hook(module, args, kwargs):
            seen[expert] = kwargs["row_mask"]

        return hook

    experts.register_forward_pre_hook(on_experts)
    for expert, layer in enumerate(experts.metis_down_proj):
        layer.register_forward_pre_hook(on_layer(expert), with_kwargs=True)
    batch = causal_batch()
    model.train()(**batch)
    mask = batch["attention_mask"].reshape(-1).bool()
    assert not mask.all()
    assert len(seen) == EXPERTS
    for expert, row_mask in seen.items():
        rows = (routes[0] == expert).any(-1).nonzero().flatten()
        assert torch.equal(row_mask, mask[rows])
    assert sum((~row_mask).sum() for row_mask in seen.values()) == 2 * (~mask).sum()


@cases(
    {"scheme": ["bf16", "nvfp4", "nvidia", "metis", "metis-paper"]}, rotated={"kind": list(KINDS)}
)
def test_to_dense_restores_the_fused_parameters(kind, scheme):
    """Names, shapes, layout, order and values: bit for bit where the weight is stored densely."""
    plain = Block(kind)
    block = to_dense(get_metis_model(Block(kind), MetisConfig(scheme=scheme)))
    state = block.state_dict()
    assert list(state) == list(plain.state_dict())
    exact = scheme in ("bf16", "nvfp4", "nvidia")
    for name, value in plain.state_dict().items():
        assert state[name].shape == value.shape
        assert state[name].is_contiguous()
        assert relative_error(state[name], value) <= (0 if exact else SPLIT_TOLERANCE), name
    assert block.experts.config._experts_implementation == "eager"
    x, index, weights = routing()
    expected = plain(x, index, weights)
    assert relative_error(block(x, index, weights), expected) <= (0 if exact else ORDER_TOLERANCE)


@pytest.mark.parametrize("kept", ["block", "down_proj"])
def test_experts_that_stay_run_as_before(kept):
    """In the same model, or in the same module: their part is bit for bit what it was."""
    model = ARCHITECTURES["mixtral"].build()
    model.set_experts_implementation("eager")
    plain = copy.deepcopy(model)
    keep = {"keep_last_blocks": 1} if kept == "block" else {"exclude_modules": ["down_proj"]}
    get_metis_model(model, MetisConfig(scheme="bf16", **keep))
    converted = [hasattr(b.mlp.experts, "metis_gate_up_proj") for b in model.model.layers]
    assert converted == ([True, False] if kept == "block" else [True, True])
    implementations = [b.mlp.experts.config._experts_implementation for b in model.model.layers]
    assert implementations == ["metis" if done else "eager" for done in converted]
    batch = causal_batch()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
        # Another choice for the model concerns those that were not converted.
        model.set_experts_implementation("grouped_mm")
        assert torch.isfinite(model(**batch).logits).all()
    to_dense(model)
    assert {b.mlp.experts.config._experts_implementation for b in model.model.layers} == {
        "grouped_mm"
    }


def test_coverage_of_mixtral_8x7b():
    """At its true shape, on the meta device: nearly all of 46.7 billion parameters."""
    config = transformers.MixtralConfig()  # the defaults are the 8x7B model
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    report = get_metis_model(model, MetisConfig()).metis_report
    hidden, inner, blocks = 4096, 14336, 32
    attention = blocks * (2 * hidden * hidden + 2 * hidden * 1024)  # q and o; k and v of 8 heads
    expert = blocks * 3 * hidden * inner
    assert report.total_params == 46_702_792_704
    assert report.converted_params == attention + 8 * expert
    assert report.converted_params / report.total_params > 0.99
    # Two experts a token; the head and the routers stay.
    active = attention + 2 * expert
    stays = hidden * 32000 + blocks * hidden * 8
    assert report.flops_share == pytest.approx(active / (active + stays))
    assert len(report.layers) == blocks * (4 + 2 * 8)
    routers = {f"model.layers.{block}.mlp.gate.weight": "router" for block in range(blocks)}
    assert report.skipped == {"lm_head": "output head", **routers}
    text = str(report)
    assert "640 layers converted || 46,439,333,888 of 46,702,792,704 params (99.4%)" in text
    assert "rank 48 (64 layers), 64 (576 layers)" in text
    assert "kept in high precision (output head): lm_head" in text


def test_health_groups_experts():
    """One mean for the experts of all layers, apart from a shared expert's layer."""
    stats = {
        "model.layers.0.mlp.experts.metis_down_proj.0": {"weight": {"energy": 1.0}},
        "model.layers.1.mlp.experts.metis_down_proj.3": {"weight": {"energy": 3.0}},
        "model.layers.1.mlp.shared_expert.down_proj": {"weight": {"energy": 7.0}},
    }
    means = group_means(stats)
    assert means == {"weight/metis_down_proj/energy": 2.0, "weight/down_proj/energy": 7.0}


@pytest.mark.slow
def test_callback_with_experts_that_see_no_token(tmp_path):
    """Health, refresh and logs over a few steps; 16 experts and too few tokens for them all."""
    model = mixtral(16, intermediate_size=48, num_experts_per_tok=2)
    get_metis_model(model, MetisConfig(refresh_interval=2, split_weight=True))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (4, 6))]
    callback = MetisCallback(health_interval=2, health_details="kinds")
    made = trainer(tmp_path, model, [callback], data=rows, per_device_train_batch_size=1)
    made.train()
    history = records(made)
    assert len(history) == 4
    for kind in ("weight", "activation", "gradient"):
        assert f"metis/{kind}/metis_down_proj/stable_rank" in history[0]
    assert history[0]["metis/nonfinite_tensors"] == 0
    assert history[1]["metis/refresh_drift"] < REFRESH_TOLERANCE
    record = json.loads((tmp_path / HEALTH_FILE).read_text().splitlines()[0])
    measured = {name: set(kinds) for name, kinds in record["layers"].items() if "experts" in name}
    assert len(measured) == 2 * 16
    assert {"weight"} in measured.values()  # no token went there
    assert {"weight", "activation", "gradient"} in measured.values()
