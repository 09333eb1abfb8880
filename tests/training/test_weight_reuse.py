"""Quantized weights that several micro-batches share: same bits, quantized once, never stale."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import llama
from design import cases
from layers.layer_tools import FP4_STRUCTURES, layer_of
from tensors import assert_same

from metis_hf import MetisCallback, MetisConfig, get_metis_model, metis_layers, reuse_weights
from metis_hf.layers.gemm import GemmPlan
from metis_hf.layers.tensor_parallel import COLWISE, WHOLE, Shards
from metis_hf.operands.kept import mark_of
from metis_hf.operands.kept_weight import KeptWeight
from metis_hf.operands.split_weight import SplitWeight
from metis_hf.operands.weight_forms import ClippedWeight, DenseWeight
from metis_hf.schemes import Role, layer_rank
from metis_hf.training import weight_reuse
from training.trainer_tools import converted, trainer

FORMS = (DenseWeight, ClippedWeight, SplitWeight)


@pytest.fixture
def encodings(monkeypatch):
    """Notes how weights are quantized: in two halves ("encode"), or at once ("quantize")."""
    calls: list[str] = []
    for form in FORMS:
        for name in ("encode", "quantize"):
            original = getattr(form, name)

            def spy(self, *args, original=original, name=name, **kwargs):
                calls.append(name)
                return original(self, *args, **kwargs)

            monkeypatch.setattr(form, name, spy)
    return calls


def micro_batches(layer, dtype=torch.float32):
    """y and all gradients of two micro-batches, as one list."""
    layer.zero_grad()
    found = []
    for seed in range(2):
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            y = layer(x)
        y.float().square().sum().backward()
        found += [y.detach(), x.grad]
    return found + [p.grad for p in layer.parameters() if p.requires_grad]


def assert_reuse_changes_no_bit(layer, encodings, dtype=torch.float32):
    """Leaves in `encodings` how weights were quantized that two micro-batches shared."""
    fresh = copy.deepcopy(layer)  # a state has seen nothing of these micro-batches either
    plain = micro_batches(layer, dtype)
    assert encodings == ["quantize"] * 4  # fprop and dgrad of two micro-batches
    encodings.clear()
    with reuse_weights(fresh):
        assert_same(micro_batches(fresh, dtype), plain)
    assert fresh.reused_weight is None


# The dtype is that of what is made of the codes.
@cases({"scheme, mode": FP4_STRUCTURES}, rotated={"dtype": [torch.float32, torch.bfloat16]})
def test_reusing_changes_no_bit(scheme, mode, dtype, encodings):
    _, layer = layer_of(scheme, mode, i=64, o=48)
    assert_reuse_changes_no_bit(layer, encodings, dtype)
    if layer.scheme.fprop_weight.conditioner.needs_state:  # scales are those of the call
        assert encodings == ["quantize"] * 4
    else:  # two where dgrad has a copy of its own
        assert encodings in (["encode"], ["encode"] * 2)


def test_static_scales_that_are_fixed(encodings):
    """What they scale is the same in every micro-batch."""
    _, layer = layer_of("w4a4", i=64, o=48)
    layer.input_amax.fill_(2.0)
    layer.weight_amax.fill_(layer.weight.detach().abs().max())
    layer.scales_frozen.fill_(1)
    assert_reuse_changes_no_bit(layer, encodings)
    assert encodings == ["encode"]


@pytest.mark.parametrize("scheme", ["nvfp4", "metis"])
def test_a_changed_weight_is_quantized_anew(scheme, encodings):
    """Though nothing may change inside the block."""
    _, layer = layer_of(scheme, i=64, o=48)
    x = torch.randn(40, 64)
    with reuse_weights(layer):
        layer(x)
        with torch.no_grad():
            layer.weight_params()[-1].mul_(2)
        changed = layer(x)
    assert torch.equal(changed, layer(x))
    assert encodings.count("encode") == 2


@pytest.mark.parametrize("split", [True, False], ids=["stored split", "split at use"])
def test_what_is_held_is_packed(split):
    _, layer = layer_of("metis", i=512, o=512, split_weight=split, decompose=("weight",))
    rank = layer_rank(layer.config, 512, 512)
    with reuse_weights(layer):
        layer(torch.randn(4, 512))
        values = layer.reused_weight.at(mark_of(*layer.weight_params())).values()
        tensors = [t for e in values for t in e.tensors]
        assert all(e == e.stored() for e in values)
        held = sum(t.untyped_storage().nbytes() for t in tensors)
    factors = 2 * 512 * rank
    lengths = 0 if split else 4 * rank  # of the directions: s is a parameter, lam is not
    assert held == (512 * 512 + factors) * 4.5 / 8 + 3 * 4 + lengths


@pytest.mark.parametrize(
    ("options", "training"), [({"split_weight": True}, True), ({"decompose": ("weight",)}, False)]
)
def test_factors_of_held_weights(options, training, encodings):
    """Corrections take them from the codes: the same bits, in either mode."""
    _, layer = layer_of("metis", i=64, o=48, **options)
    assert Role.FPROP_INPUT in layer.scheme.corrected
    assert_reuse_changes_no_bit(layer.train(training), encodings)
    assert encodings == ["encode"]


def test_modes_of_a_layer_are_kept_apart():
    """Eval rounds to nearest; what training has quantized is not for it."""
    _, layer = layer_of("nvfp4", i=64, o=48)
    x = torch.randn(40, 64)
    expected = layer.eval()(x)
    with reuse_weights(layer):
        layer.train()(x)
        assert torch.equal(layer.eval()(x), expected)


@pytest.mark.parametrize(("accumulation", "checkpointing"), [(1, False), (3, False), (1, True)])
def test_callback(accumulation, checkpointing, tmp_path, encodings, monkeypatch):
    """Each weight once a step where that pays, and the trained weights are the same bits."""

    def train(callbacks):
        model = converted()
        trainer(
            tmp_path, model, callbacks, max_steps=2, gradient_accumulation_steps=accumulation,
            gradient_checkpointing=checkpointing,
        ).train()  # fmt: skip
        return model

    plain = train([])
    encodings.clear()
    held = []
    original = GemmPlan.weight_operand
    monkeypatch.setattr(
        GemmPlan,
        "weight_operand",
        lambda plan, *args: held.append(plan.kept is not None) or original(plan, *args),
    )
    reused = train([MetisCallback(health_interval=0)])
    layers = dict(metis_layers(reused))
    expected = accumulation > 1 or checkpointing
    assert set(held) == {expected}
    if expected:
        assert encodings == ["encode"] * 2 * len(layers)
    assert all(layer.reused_weight is None for layer in layers.values())
    assert_same(reused, plain)


@pytest.mark.parametrize(("style", "held"), [(COLWISE, False), (WHOLE, True), (None, False)])
def test_parts_of_weights_are_not_held(style, held):
    """A cut layer's operands take a scale of all processes; whole copies of shards would stay."""
    _, layer = layer_of("nvfp4-rne")
    if style is None:
        layer.weight.placements = ()  # as of a DTensor
    else:
        layer.shards = Shards(style, 2)
    with reuse_weights(layer):
        assert (layer.reused_weight is not None) == held


def test_a_step_that_nobody_ended_is_forgotten_at_the_next_update():
    """An exception between two micro-batches; fused optimizers leave no trace on parameters."""
    model = get_metis_model(llama(1), MetisConfig(scheme="nvfp4-rne"))
    fresh = copy.deepcopy(model)
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    weight_reuse.hold(model)
    found = []
    for each in (model, fresh):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True)
        for _ in range(3):
            loss = each(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[:3] == found[3:]
    weight_reuse.release(model)
    _, layer = next(metis_layers(model))
    layer.reused_weight = kept = KeptWeight()
    optimizer.step()
    assert layer.reused_weight is kept  # nothing listens to optimizers any more


def test_other_weights_at_one_address_are_told_apart():
    """Fast weights: each lives for one call, and memory is given to the next."""
    linear, layer = layer_of("nvfp4-rne", i=64, o=48)
    x, weight = torch.randn(8, 64), linear.weight.detach()
    with reuse_weights(layer):
        for _ in range(4):
            given = weight + torch.randn_like(weight)
            y = torch.func.functional_call(layer, {"weight": given}, x)
            exact = torch.nn.functional.linear(x, given, linear.bias)
            assert (y - exact).norm() < 0.3 * exact.norm()


def test_a_copy_holds_nothing():
    """Nobody would release it."""
    _, layer = layer_of("nvfp4-rne", i=64, o=48)
    x = torch.randn(8, 64)
    with reuse_weights(layer):
        layer(x)
        copied = copy.deepcopy(layer)
    assert copied.reused_weight is None
    copied.weight.data.mul_(0.5)
    layer.weight.data.mul_(0.5)
    assert torch.equal(copied(x), layer(x))


@pytest.mark.parametrize("scheme", ["quartet2", "tetrajet2"])
def test_gradients_through_a_frozen_weight_average_out(scheme):
    """As under LoRA: the weight is not rounded alike in every step, though it is held."""
    torch.manual_seed(0)
    _, layer = layer_of(scheme, i=128, o=128)
    layer.weight.requires_grad_(False)  # its bias trains
    dy, calls = torch.randn(40, 128), 16
    forward = layer.scheme.fprop_weight.quantizer
    exact = dy @ forward(layer.weight.detach(), dim=-1)
    weight_reuse.hold(layer)
    gradients = []
    for _ in range(calls):
        x = torch.randn(40, 128, requires_grad=True)
        layer(x).backward(dy)
        gradients.append(x.grad)
    single = sum((each - exact).norm() for each in gradients) / calls
    assert (sum(gradients) / calls - exact).norm() < 0.4 * single  # 1/4, were all unbiased
    again = x.detach().requires_grad_()
    layer(again).backward(dy)
    assert torch.equal(again.grad, x.grad)


@pytest.mark.parametrize(
    ("scheme", "options", "training"),
    [
        ("nvfp4", {"high_precision": ("backward",)}, True),
        ("metis", {"high_precision": ("backward",)}, True),
        ("tetrajet2", {}, True),
        ("quartet2", {}, False),  # rotated with the signs of the call, rounded to nearest
    ],
)
def test_frozen_weights(scheme, options, training):
    """As under adapters: what the backward pass draws is drawn anew in each call."""
    _, layer = layer_of(scheme, i=64, o=48, **options)
    layer.weight.requires_grad_(False)
    plain = micro_batches(layer.train(training))
    with reuse_weights(layer):
        assert_same(micro_batches(layer), plain)


def test_copies_that_hooks_unpack_are_not_kept():
    """As of torch.autograd.graph.save_on_cpu: backward's parameters are other tensors each time."""
    _, layer = layer_of("nvfp4-rne", i=64, o=48)
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda each: each)
    with reuse_weights(layer), hooks:
        for _ in range(3):
            layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
        assert len(layer.reused_weight) == 1


def test_evaluation_does_not_take_what_is_held_for_training():
    """A step that ended in an exception holds weights still, and averages write through `.data`."""
    _, layer = layer_of("nvfp4-rne", i=64, o=48)
    x = torch.randn(8, 64)
    weight_reuse.hold(layer)
    layer(x)
    layer.weight.data.mul_(1.5)
    fresh = copy.deepcopy(layer)
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), fresh.eval()(x))
    weight_reuse.release(layer)
