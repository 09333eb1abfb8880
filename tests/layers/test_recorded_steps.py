"""A step can be recorded once and played again on other values, as CUDA graphs do.

A recording holds operators and what Python computed on the way, as constants. Played on another
batch and other weights it gives what a step in Python gives, to the bit: so nothing that the values
decide was decided in Python, and noise is new at each step. `make_fx` records; the last test needs
a CUDA device.
"""

from __future__ import annotations

import pytest
import torch
from conftest import llama
from design import some_slow
from tensors import assert_same
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from layers.layer_tools import STRUCTURES, layer_of
from metis_hf import MetisConfig, get_metis_model
from metis_hf.numerics.kernels import use_kernels


def step(layer: nn.Module, parameters: list[Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the first input and all parameters."""
    x, grad_output, *others = inputs
    names = [name for name, _ in layer.named_parameters()]
    y = functional_call(layer, dict(zip(names, parameters)), (x, *others))
    return [y, *torch.autograd.grad(y, [x, *parameters], grad_output)]


def record(layer: nn.Module, parameters: list[Tensor], *inputs: Tensor) -> fx.GraphModule:
    """Record a step, with one fake mode for all values: each of its own would note its stack."""
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(lambda *flat: step(layer, list(flat[3:]), *flat[:3]))(*inputs, *parameters)


def values(layer: nn.Module, seed: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Make parameters near those of the layer, an input with dominant directions, dy, a mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    parameters = [
        (p.detach() + 0.01 * seed * normal(*p.shape)).requires_grad_() for p in layer.parameters()
    ]
    x = normal(96, 64) + 5 * normal(96, 2) @ normal(2, 64)
    mask = torch.rand(96, generator=generator) < 0.8
    return parameters, x.requires_grad_(), normal(96, 48), mask


# Whose parts are those of quick ones.
COMBINED = [
    ("averis", "contraction"), ("halo", "shared"), ("hot-channel", "contraction"),
    ("metis-paper", "contraction"), ("mxfp4-hadamard", "contraction"),
    ("nvidia-paper", "contraction"), ("quip", "contraction"), ("svdquant", "shared"),
    ("w4a16", "shared"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "mode"), some_slow(STRUCTURES, COMBINED))
def test_a_recorded_layer_is_the_layer(scheme, mode) -> None:
    _, layer = layer_of(scheme, mode, i=64, o=48)
    parameters, *inputs = values(layer, 0)
    recorded = record(layer, parameters, *inputs)
    parameters, *inputs = values(layer, 1)
    played = recorded(*inputs, *parameters)
    assert_same(played, step(layer, parameters, *inputs))
    assert played[1].abs().max() > 0


def test_scales_that_are_fixed_later_count_in_a_recording() -> None:
    _, layer = layer_of("w4a4", "shared", i=64, o=48)
    parameters, *inputs = values(layer, 0)
    recorded = record(layer, parameters, *inputs)
    before = recorded(*inputs, *parameters)
    for name, value in (("input_amax", 2), ("weight_amax", 1), ("scales_frozen", 1)):
        layer.get_buffer(name).fill_(value)
    played = recorded(*inputs, *parameters)
    for one, other in zip(played, step(layer, parameters, *inputs), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(played[0], before[0])


def test_what_python_decides_shows() -> None:
    """The comparison fails for a layer whose noise is a number of the host's."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(x) + Counting.calls

    layer = Counting(64, 48)
    parameters, *inputs = values(layer, 0)
    recorded = record(layer, parameters, *inputs)
    played, wanted = recorded(*inputs, *parameters), step(layer, parameters, *inputs)
    assert not torch.equal(played[0], wanted[0])


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss under the causal mask [1 1 s s] that transformers takes as it is.

    One that transformers makes itself is copied from the CPU, which no recording may do.
    """
    length = ids.shape[-1]
    mask = torch.full((1, 1, length, length), float("-inf"), device=ids.device).triu_(1)
    return model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvidia", "metis"])
def test_a_model_under_reduce_overhead(scheme) -> None:
    """With the kernels that a GPU's user gets."""
    models = []
    for _ in range(2):
        model = get_metis_model(llama(), MetisConfig(scheme=scheme))
        model.set_attn_implementation("eager")  # the same kernels, and the same sums, at each step
        models.append(model.cuda().train())
    plain, model = models
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, mode="reduce-overhead")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(0, 64, (2, 16), generator=generator).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        losses = []
        for one in (compiled, plain):
            one.zero_grad()
            with use_kernels(None):
                loss = loss_of(one, ids)
                loss.backward()
            losses.append(loss.detach().clone())
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
