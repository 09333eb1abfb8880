"""A rehearsal needs the programs of the layer that it stands for, and leaves nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch
from design import cases
from torch import nn
from transformers.pytorch_utils import Conv1D

from layers.layer_tools import FP4_STRUCTURES, layer_of
from metis_hf import MetisConfig
from metis_hf.layers.make import convert_linear
from metis_hf.layers.rehearsal import LayerRehearsal
from metis_hf.numerics.kernels import ahead, compiled, use_kernels

# Their blocks are not those of NVFP4, which is what is compiled.
OTHER_FORMATS = {"ufp4", "mxfp4", "mxfp4-hadamard", "if4", "mixfp4"}
AUTOCASTS = [None, torch.bfloat16]


class ARealStep:
    """What `ahead.rehearse` takes, around the layer itself at its own size."""

    def __init__(self, layer, x, autocast=None):
        self.layer, self.x, self.autocast = layer, x, autocast

    def mode(self):
        return None

    def run(self, mode):
        training = self.layer.training
        x = self.x.clone().requires_grad_(training)
        with (
            torch.set_grad_enabled(training),
            torch.autocast("cpu", self.autocast, enabled=self.autocast is not None),
        ):
            y = self.layer(x)
        if training:
            y.float().cos().sum().backward()


@pytest.fixture
def noted_calls(monkeypatch):
    """Kernels are chosen as on a machine that compiles; what is noted is not compiled."""
    monkeypatch.setattr(compiled, "missing", lambda device: None)
    with use_kernels(None):
        yield


def rehearsed(layer) -> set:
    rehearsal = LayerRehearsal(layer)
    mode = rehearsal.mode()
    assert mode is not None
    return set(ahead.rehearse(rehearsal, mode))


@pytest.mark.parametrize(("scheme", "mode"), FP4_STRUCTURES)
def test_programs_are_those_of_a_step(noted_calls, scheme, mode):
    layer = layer_of(scheme, mode, i=320, o=192)[1]
    x = torch.randn(384, 320)
    found = set(ahead.rehearse(ARealStep(layer, x), None))
    assert rehearsed(layer) == found
    assert bool(found) == (layer.config.scheme not in OTHER_FORMATS)
    layer.eval()
    found = set(ahead.rehearse(ARealStep(layer, x), None))
    assert rehearsed(layer) == found


@cases(
    {"dtype": [torch.float32, torch.bfloat16], "autocast": AUTOCASTS},
    rotated={"kind": ["linear", "conv1d", "unaligned"]},
)
def test_dtypes_layouts_and_odd_sizes(noted_calls, kind, dtype, autocast):
    out_features = 196 if kind == "unaligned" else 192
    module = Conv1D(out_features, 320) if kind == "conv1d" else nn.Linear(320, out_features)
    layer = convert_linear(module.to(dtype), MetisConfig(), name="layer").train()
    found: set = set()
    for x_dtype in {dtype, autocast or dtype}:
        x = torch.randn(384, 320, dtype=x_dtype)
        found |= set(ahead.rehearse(ARealStep(layer, x, autocast), None))
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        assert rehearsed(layer) == found
    assert found


def test_nothing_else_is_touched(noted_calls):
    """Neither generators, nor gradients, nor the hooks under which the caller saves tensors."""
    layer = layer_of("metis", i=64, o=64)[1]
    saved = []
    state = torch.random.get_rng_state()

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.no_grad():
        assert rehearsed(layer)
    assert not saved
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in layer.parameters())


def test_a_layer_that_is_gone_is_not_rehearsed():
    layer = layer_of("metis", i=64, o=64)[1]
    rehearsal = LayerRehearsal(layer)
    mode = rehearsal.mode()
    assert mode is not None
    del layer
    gc.collect()
    assert rehearsal.mode() is None
    assert ahead.rehearse(rehearsal, mode) == []


def test_conversion_leaves_one_rehearsal_for_equal_layers(monkeypatch):
    monkeypatch.setattr(ahead, "_rehearsals", {})
    layers = [layer_of("metis", i=i, o=o)[1] for i, o in ((64, 96), (128, 64))]
    assert len(ahead._rehearsals) == 1
    layers.append(layer_of("nvidia", i=64, o=64)[1])
    layers.append(layer_of("bf16", i=64, o=64)[1])  # quantizes nothing
    assert len(ahead._rehearsals) == 2
