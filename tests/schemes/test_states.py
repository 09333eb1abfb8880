"""Hooks of layer states: a state of one's own, seen from the step that calls it."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from layers.layer_tools import layer_of
from tensors import assert_same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from metis_hf.layers import linear
from metis_hf.layers.linear import QuantLinear
from metis_hf.schemes.channel_ranges import RunningRange
from metis_hf.schemes.states import LayerState, is_known_set
from metis_hf.training.layer_states import after_step, check_states


@dataclass(frozen=True)
class Counting(LayerState):
    """Counts the steps of a layer, and shrinks its weight by a share in each."""

    share: float = 0.5

    writes_weights: ClassVar[str] = "shrinking"

    def initial(self, in_features, out_features):
        return {"steps": torch.zeros(())}

    def after_step(self, layers, step, max_steps):
        for layer in layers.values():
            layer.buffers["steps"] += 1
            layer.write(layer.weight() * self.share)
        return {"shrunk": dict.fromkeys(layers, step / max_steps)}


def with_state(state, *, conv1d=False, **options):
    _, layer = layer_of("nvfp4", i=32, o=16, **options)
    if conv1d:
        layer = QuantLinear(layer.weight.T.contiguous(), None, layer.config, conv1d=True)
    scheme = replace(layer.scheme, state=state)
    with mock.patch.object(linear, "build_scheme", return_value=scheme):
        layer.set_config(layer.config)
    return layer


@dataclass(frozen=True)
class OfAllKinds(LayerState):
    """Buffers of one number in every dtype."""

    def initial(self, in_features, out_features):
        kinds = (torch.int64, torch.uint8, torch.bool, torch.float64, torch.bfloat16)
        return {str(kind).replace("torch.", "of_"): torch.ones((), dtype=kind) for kind in kinds}


def test_casts_of_the_model_leave_a_state_of_any_dtype():
    layer = with_state(OfAllKinds())
    before = {name: buffer.clone() for name, buffer in layer.state_buffers().items()}
    nn.Sequential(layer).to(torch.float16)
    assert layer.weight.dtype is torch.float16
    for name, buffer in layer.state_buffers().items():
        assert str(buffer.dtype) == name.replace("of_", "torch.")
        assert torch.equal(buffer, before[name])


class TestDefaults:
    def test_nothing_happens(self):
        state = LayerState()
        layer = with_state(state)
        assert layer.state_buffers() == {}
        x = torch.randn(4, 32)
        assert layer.call_state(x, layer.call_keys(x), update=True) is None
        before = layer.weight.detach().clone()
        layer(x).sum().backward()
        assert after_step(nn.Sequential(layer), 1, 2) == {}
        assert torch.equal(layer.weight, before)
        assert state.writes_weights == ""

    def test_a_model_without_states(self):
        _, layer = layer_of("nvfp4")
        assert after_step(nn.Sequential(layer), 1, 2) == {}


class TestAfterStep:
    def test_equal_states_are_called_together(self, monkeypatch):
        calls = []
        hook = Counting.after_step

        def spy(self, layers, step, max_steps):
            calls.append((self.share, list(layers), step, max_steps))
            return hook(self, layers, step, max_steps)

        monkeypatch.setattr(Counting, "after_step", spy)
        states = [Counting(), Counting(0.25), Counting()]
        model = nn.Sequential(*map(with_state, states), nn.Linear(3, 3))
        before = [layer.weight.detach().clone() for layer in model[:3]]
        figures = after_step(model, 3, 4)
        assert calls == [(0.5, ["0", "2"], 3, 4), (0.25, ["1"], 3, 4)]
        assert figures == {"shrunk": {"0": 0.75, "2": 0.75, "1": 0.75}}
        for layer, old in zip(model, before):
            assert torch.equal(layer.weight, old * layer.scheme.state.share)
            assert layer.state_buffers()["steps"] == 1

    def test_transposed_and_low_precision_weights_are_shown_alike(self):
        layer = with_state(Counting(), conv1d=True)
        before = layer.weight.detach().clone()
        after_step(nn.Sequential(layer), 1, 1)
        assert torch.equal(layer.weight, before / 2)
        layer = with_state(Counting(), dtype=torch.bfloat16)
        parameter, before = layer.weight, layer.weight.detach().clone()
        after_step(nn.Sequential(layer), 1, 1)
        assert layer.weight is parameter  # written in place: the optimizer keeps its own
        assert torch.equal(layer.weight, before / 2)

    def test_processes_agree_before_the_hook_runs(self, monkeypatch):
        """Only where there are several; the same layers on each."""
        order = []
        monkeypatch.setattr(Counting, "synchronize", lambda *_: order.append("synchronize"))
        monkeypatch.setattr(Counting, "after_step", lambda *_: order.append("after") or {})
        model = nn.Sequential(with_state(Counting()))
        after_step(model, 1, 1)
        assert order == ["after"]
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        after_step(model, 2, 2)
        assert order == ["after", "synchronize", "after"]


def test_engines_that_train_copies_are_refused_by_name():
    """What is written to a parameter that DeepSpeed manages would be undone."""
    model = nn.Sequential(with_state(Counting()))
    check_states(model)
    model[0].weight.ds_id = 0
    with pytest.raises(
        NotImplementedError, match=r"shrinking \(scheme nvfp4\) does not work under"
    ):
        check_states(model)
    harmless = nn.Sequential(with_state(LayerState()))
    harmless[0].weight.ds_id = 0
    check_states(harmless)


class TestKnownFlag:
    """A flag on the device, read once a change."""

    def test_follows_the_flag(self, monkeypatch):
        flag = torch.zeros((), dtype=torch.int32)
        reads = []
        item = torch.Tensor.item
        monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or item(self))
        assert [is_known_set(flag) for _ in range(3)] == [False] * 3
        flag.fill_(1)
        assert [is_known_set(flag) for _ in range(3)] == [True] * 3
        assert len(reads) == 2
        flag.data = torch.zeros((), dtype=torch.int32)
        assert not is_known_set(flag)

    def test_unknown_where_reading_would_wait_or_fail(self, monkeypatch):
        flag = torch.ones((), dtype=torch.int32)
        assert is_known_set(flag)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert not is_known_set(mode.from_tensor(flag))
            assert not is_known_set(flag)
        assert not is_known_set(flag.to("meta"))
        with torch.inference_mode():
            assert not is_known_set(torch.ones((), dtype=torch.int32))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        assert not is_known_set(flag)


class Process:
    """A layer of one channel on one of two processes, with the buffers of a running range."""

    def __init__(self):
        self.buffers = RunningRange().initial(1, 1)

    def call(self, largest, step):
        """A call in training, in a step in which the weight has this mark."""
        mark = torch.tensor(step, dtype=torch.int32)
        RunningRange().update(self.buffers, torch.tensor([[largest], [0.0]]), mark)


def synchronized(*processes):
    """Let them do so together, each in a thread, with the all-reduce that they wait in."""
    barrier, given = threading.Barrier(len(processes)), {}

    def all_reduce(x, op):
        assert op is torch.distributed.ReduceOp.MAX
        given[threading.get_ident()] = x.clone()
        barrier.wait()
        largest = functools.reduce(torch.maximum, given.values())
        barrier.wait()
        x.copy_(largest)
        barrier.wait()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(processes)) as pool:
        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        state = RunningRange()
        list(pool.map(lambda process: state.synchronize({"layer": process}), processes))


def test_a_process_without_tokens_holds_no_range_back():
    """An expert of which one process has seen a single batch, long ago, and the other all."""
    seldom, always, alone = Process(), Process(), Process()
    for step in range(60):
        largest = 10.0 if step == 0 else 1.0
        always.call(1.0, step)
        alone.call(largest, step)
        if step == 0:
            seldom.call(10.0, step)
        synchronized(seldom, always)
        assert_same(seldom.buffers, always.buffers)
    assert torch.equal(always.buffers["running_range"], alone.buffers["running_range"])
    assert 1.0 < float(always.buffers["running_range"][0]) < 1.1


def test_a_layer_that_no_process_has_run_stays_as_it_is():
    one, other = Process(), Process()
    for process in (one, other):
        process.call(2.0, 1)
    synchronized(one, other)
    before = {name: buffer.clone() for name, buffer in one.buffers.items()}
    synchronized(one, other)
    assert_same(one.buffers, before)
