"""Schemes that keep something of a layer from step to step, or store more than its weight."""

from __future__ import annotations

import copy
import functools
import itertools

import forked
import numpy as np
import pytest
import torch
import transformers
from conftest import llama
from design import some_slow
from layers.layer_tools import layer_of
from tensors import assert_same, same
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from training.trainer_tools import converted, trainer

from metis_hf import (
    MetisCallback,
    MetisConfig,
    get_metis_model,
    metis_layers,
    set_precision,
    to_dense,
)
from metis_hf.layers.make import convert_linear
from metis_hf.numerics import fake_quantize
from metis_hf.schemes import tetrajet2
from metis_hf.schemes.channel_ranges import DECAY, STATE
from metis_hf.schemes.states import Oscillation
from schemes import stateful_run

CHANNELWISE = ["smoothquant", "outlier-suppression-plus", "svdquant"]
OURS = [*CHANNELWISE, "omniquant", "tetrajet2"]
IN, OUT, TOKENS = 70, 52, 37
FP32 = {"rtol": 1e-5, "atol": 1e-6}  # a few roundings of numbers near one


def inputs(count, seed=0):
    """Activations with columns of different size and centre, other ones each time."""
    g = torch.Generator().manual_seed(seed)
    centre = torch.randn(IN, generator=g) * torch.logspace(0, 1, IN)
    sizes = [1 + step / 4 for step in range(count)]
    return [(torch.randn(TOKENS, IN, generator=g) * size + centre) for size in sizes]


def train(layer, batches, micro_batches=2, call=None):
    """SGD steps of two micro-batches each; outputs and gradients of all of them."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    seen = []
    for step in range(0, len(batches), micro_batches):
        optimizer.zero_grad()
        # Both forward passes come before the backward passes, as in preference optimization.
        outputs = [(call or layer)(x) for x in batches[step : step + micro_batches]]
        sum(y.square().mean() for y in outputs).backward()
        seen += [y.detach() for y in outputs] + [p.grad.clone() for p in layer.parameters()]
        optimizer.step()
    return seen


def state_of(layer):
    return {name: value.clone() for name, value in layer.state_buffers().items()}


class Reference:
    """Running ranges by the definition: averages over steps of each column's extremes."""

    def __init__(self):
        self.high = self.low = None

    def step(self, *batches):
        x = np.concatenate([x.double().numpy() for x in batches])
        if self.high is None:
            self.high, self.low = x.max(0), x.min(0)
        else:
            self.high = DECAY * self.high + (1 - DECAY) * x.max(0)
            self.low = DECAY * self.low + (1 - DECAY) * x.min(0)

    def channels(self, scheme, weight):
        w = np.abs(weight.detach().double().numpy()).max(0)
        if scheme != "outlier-suppression-plus":
            return (np.maximum(abs(self.high), abs(self.low)) / w) ** 0.5, None
        half = (self.high - self.low) / 2
        median = np.sort(half)[(len(half) - 1) // 2]
        s = np.maximum(1, half / (median * half.max()) ** 0.5)
        return s, (self.high + self.low) / 2


@pytest.mark.parametrize("scheme", CHANNELWISE)
def test_scales_of_a_training_against_the_definition(scheme, monkeypatch):
    """The first step by each call's own input; then by the steps before, micro-batches alike."""
    torch.manual_seed(0)
    _, layer = layer_of(scheme, i=IN, o=OUT)
    found = []
    freeze = type(layer.scheme.state).freeze

    def spy(state, buffers, x, weight, keys):
        channels = freeze(state, buffers, x, weight, keys)
        found.append((channels, weight.clone()))
        return channels

    monkeypatch.setattr(type(layer.scheme.state), "freeze", spy)
    batches = inputs(8)
    train(layer, batches)
    assert len(found) == len(batches)
    running = Reference()
    for index, (channels, weight) in enumerate(found):
        if index < 2:
            expected = Reference()
            expected.step(batches[index])
        else:
            if index % 2 == 0:
                running.step(batches[index - 2], batches[index - 1])
            expected = running
        s, z = expected.channels(scheme, weight)
        torch.testing.assert_close(channels.scale, torch.tensor(s).float(), **FP32)
        if z is None:
            assert channels.shift is None
        else:
            torch.testing.assert_close(channels.shift, torch.tensor(z).float(), **FP32)


@pytest.mark.parametrize("scheme", CHANNELWISE)
def test_evaluation_uses_the_statistics_and_leaves_them(scheme):
    _, layer = layer_of(scheme, i=IN, o=OUT)
    train(layer, inputs(4))
    before = state_of(layer)
    layer.eval()
    x = inputs(1, seed=9)[0]
    y = layer(x)
    assert same(state_of(layer), before)
    # Scales are those of training: a row's result does not depend on what other rows it is with,
    # up to the one scale of the whole tensor.
    channels = layer.call_state(x, layer.call_keys(x))
    assert torch.equal(channels.scale, layer.call_state(100 * x, layer.call_keys(x)).scale)
    assert torch.equal(layer(x), y)
    layer.train()(x)
    assert not same(state_of(layer), before)


@pytest.mark.parametrize(("reentrant", "scheme"), zip(itertools.cycle([False, True]), OURS))
def test_recomputation_repeats_the_call(scheme, reentrant):
    """Outputs, gradients and the state itself, over several steps."""
    torch.manual_seed(0)
    _, layer = layer_of(scheme, i=IN, o=OUT)
    other = copy.deepcopy(layer)
    batches = [x.requires_grad_() for x in inputs(8)]
    plain = train(layer, batches)
    again = train(other, batches, call=lambda x: checkpoint(other, x, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, again))
    assert same(state_of(layer), state_of(other))


def test_casts_leave_the_state_in_fp32():
    for scheme in OURS:
        _, layer = layer_of(scheme, i=IN, o=OUT)
        train(layer, inputs(4))
        before = state_of(layer)
        for cast in (torch.bfloat16, torch.float16, torch.float64):
            assert layer.to(cast).weight_params()[-1].dtype is cast
            assert same(state_of(layer), before)
            assert not any(b.dtype in (cast, torch.int64) for b in layer.state_buffers().values())
        layer.to("meta")
        assert all(b.is_meta for b in layer.state_buffers().values())


@pytest.mark.parametrize("scheme", ["svdquant", "tetrajet2"])
def test_from_pretrained_in_bf16(scheme, tmp_path, token_ids):
    dtype = torch.bfloat16
    torch.manual_seed(0)
    model = get_metis_model(llama(), MetisConfig(scheme=scheme)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(input_ids=token_ids, labels=token_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for (_, a), (_, b) in zip(metis_layers(model), metis_layers(loaded), strict=True):
        assert same(state_of(a), state_of(b))
        x = torch.randn(40, a.in_features, dtype=dtype)
        assert torch.equal(a.eval().to(dtype)(x), b.eval()(x))


def test_to_dense_gives_the_plain_weight():
    for scheme in OURS:
        linear, layer = layer_of(scheme, i=IN, o=OUT)
        dense = to_dense(nn.Sequential(layer))[0]
        assert type(dense) is nn.Linear
        torch.testing.assert_close(dense.weight.detach(), linear.weight.detach(), **FP32)
        assert not dict(dense.named_buffers())


def test_a_switch_of_schemes_makes_and_drops_the_state():
    _, layer = layer_of("nvfp4", i=IN, o=OUT)
    model = nn.Sequential(layer)
    set_precision(model, scheme="smoothquant")
    train(layer, inputs(4))
    assert layer.state_buffers()["running_range"].isfinite().all()
    before = state_of(layer)
    set_precision(model, high_precision=("forward",))
    assert same(state_of(layer), before)
    set_precision(model, scheme="nvfp4", high_precision=())
    assert not dict(layer.named_buffers())
    with pytest.raises(ValueError, match="a different form"):
        set_precision(model, scheme="omniquant")


@pytest.mark.parametrize(
    ("scheme", "value"), [("smoothquant", torch.nan), ("outlier-suppression-plus", torch.inf)]
)
def test_a_broken_batch_is_left_out(scheme, value):
    """It shows in its own result, and the step after it is as healthy as before."""
    _, layer = layer_of(scheme, i=IN, o=OUT)
    x, *more = inputs(5)
    broken = x.clone()
    broken[3, 5] = value
    train(layer, more)
    assert not layer(broken)[3].isfinite().any()
    with torch.no_grad():
        layer.weight_params()[-1].add_(1e-3)
    assert layer(x).isfinite().all()
    assert layer.state_buffers()["running_range"].isfinite().all()


def test_no_rows_leave_the_statistics():
    _, layer = layer_of("smoothquant", i=IN, o=OUT)
    x = inputs(1)[0]
    layer(x)
    before = state_of(layer)
    layer(x[:0])
    assert same(state_of(layer), before)


def test_low_rank_branch_is_exact():
    """A weight of low rank is multiplied unquantized; FP4 factors would not do that."""
    torch.manual_seed(0)
    linear = nn.Linear(96, 96, bias=False)
    linear.weight.data = torch.randn(96, 4) @ torch.randn(4, 96)
    layer = convert_linear(copy.deepcopy(linear), MetisConfig(scheme="svdquant", rank=8), name="x")
    w_hat, *_ = layer.weight_form.quantize(
        layer.weight_params(), layer.scheme.fprop_weight, dim=-1, key=layer.key, dtype=torch.float32
    )
    assert (w_hat - linear.weight).norm() < 1e-5 * linear.weight.norm()


KEPT = {"subspace_interval": 4}  # searches in steps 1, 4 and 8
REFINED = {**KEPT, "subspace_refinements": 1}
RESUMED = [(scheme, {}) for scheme in OURS]
RESUMED += [(scheme, kept) for scheme in ("metis", "metis-paper") for kept in (KEPT, REFINED)]
QUICK = ("smoothquant", {}), ("tetrajet2", {}), ("metis", REFINED)


@pytest.mark.parametrize(
    ("scheme", "fields"), some_slow(RESUMED, [each for each in RESUMED if each not in QUICK])
)
def test_resume_is_exact(scheme, fields, tmp_path, monkeypatch):
    """Cut within a window of steps and between two searches of subspaces.

    Gradient accumulation and activation checkpointing are on.
    """
    settings = {"period": 4, "window": 3, "threshold": 2.0, "start": 0.0}
    monkeypatch.setattr(tetrajet2, "Oscillation", functools.partial(Oscillation, **settings))

    def run():
        return trainer(
            tmp_path, converted(scheme, **fields), [MetisCallback(health_interval=0)], max_steps=8,
            gradient_accumulation_steps=2, gradient_checkpointing=True, learning_rate=3e-3,
            gradient_checkpointing_kwargs={"use_reentrant": False}, save_strategy="steps",
            save_steps=6,
        )  # fmt: skip

    whole = run()
    whole.train()
    cut = run()
    cut.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    states = whole.model.state_dict(), cut.model.state_dict()
    assert_same(*states)
    assert any(name.endswith("input_basis") for name in states[0]) == bool(fields)
    if scheme in CHANNELWISE:
        ranges = [value for name, value in states[0].items() if name.endswith(STATE[0])]
        assert ranges
        assert all(value.isfinite().all() for value in ranges)
    if scheme == "tetrajet2":
        resets = [e["metis/oscillation_reset"] for e in whole.state.log_history if len(e) > 3 and
                  "metis/oscillation_reset" in e]  # fmt: skip
        assert len(resets) == 1  # of steps 4 to 7
        assert resets[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_processes_agree(engine, tmp_path):
    """Every step ends with one state, and with the same weights on each process.

    Ranges are the maxima over all processes, kept subspaces the first one's.
    """
    schemes = ("smoothquant", "tetrajet2", "metis")
    torch.multiprocessing.start_processes(
        stateful_run.run,
        (engine, schemes, str(tmp_path)),
        stateful_run.RANKS,
        start_method=forked.CONTEXT.get_start_method(),
    )
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(stateful_run.RANKS))
    for scheme in schemes:
        for a, b in zip(first[scheme]["ranges"], second[scheme]["ranges"], strict=True):
            assert same(a, b)
    for step, found in enumerate(first["smoothquant"]["ranges"], 1):
        x = torch.cat([stateful_run.batch(step, rank) for rank in range(stateful_run.RANKS)])
        assert torch.equal(found["step_range"], torch.stack([x.amax(0), -x.amin(0)]))
    assert [one["subspaces_known"].tolist()[0] for one in first["metis"]["ranges"]] == [
        1,
        0,
        1,
        0,
        1,
    ]
    for step, found in enumerate(first["metis"]["ranges"], 1):
        basis = found["input_basis"]
        own, other = (stateful_run.batch(step, rank) for rank in range(stateful_run.RANKS))
        assert (own @ basis).norm() / own.norm() > 1.1 * (other @ basis).norm() / other.norm()
        torch.testing.assert_close(basis.T @ basis, torch.eye(4))
    # A window of one step, the last one; its reset comes after that.
    last = first["tetrajet2"]["ranges"][-1]
    assert (last["weight_path"] > 0).all()
    oscillates = last["quantized_path"] / last["weight_path"] >= stateful_run.WINDOW["threshold"]
    assert 0 < oscillates.float().mean() < 0.5
    weight = last["previous_weight"]
    expected = torch.where(oscillates, fake_quantize(weight), weight)
    assert torch.equal(first["tetrajet2"]["state"]["0.weight"], expected)


def test_a_frozen_weight_leaves_the_statistics():
    """Those of a base that adapters are trained over, whose checkpoints do not hold them."""
    _, layer = layer_of("smoothquant", i=IN, o=OUT)
    train(layer, inputs(4))
    before = state_of(layer)
    layer.requires_grad_(False)
    for x in inputs(3, seed=1):
        layer(x.requires_grad_()).sum().backward()
    assert same(state_of(layer), before)


@pytest.mark.parametrize("scheme", CHANNELWISE)
def test_ranges_of_an_averaged_model(scheme):
    """Averages of the infinities that stand for no range are none either: calls take their own."""
    torch.manual_seed(0)
    _, layer = layer_of(scheme, i=IN, o=OUT)
    fresh = copy.deepcopy(layer)
    average = AveragedModel(layer, use_buffers=True)
    for _ in range(3):
        average.update_parameters(layer)
    assert average.module.running_range.isnan().all()
    (x,) = inputs(1)
    for mode in (False, True):
        assert torch.equal(average.train(mode)(x), fresh.train(mode)(x))
    for _ in range(2):  # of other weights, so that the ranges of the step enter the averages
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.mul_(1.01)
        average(x)
    assert average.module.running_range.isfinite().all()
