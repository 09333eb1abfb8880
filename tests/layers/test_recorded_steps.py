"""A step can be recorded once and played again on other values, as CUDA graphs do.

A recording holds operators and what Python computed on the way, as constants. Played on another
batch and other weights it gives what a step in Python gives, to the bit: so nothing that the values
decide was decided in Python, and noise is drawn anew. On a CPU `make_fx` records; the last tests
need a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import llama
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from layers.layer_tools import SCHEME_MODES, in_one_mode, layer_of
from metis_hf import MetisConfig, get_metis_model
from metis_hf.numerics.kernels import use_kernels

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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


@pytest.mark.parametrize(("scheme", "mode"), in_one_mode(SCHEME_MODES))
def test_a_recorded_layer_is_the_layer(scheme, mode) -> None:
    _, layer = layer_of(scheme, mode, i=64, o=48)
    parameters, *inputs = values(layer, 0)
    recorded = record(layer, parameters, *inputs)
    for seed in (1, 2):
        parameters, *inputs = values(layer, seed)
        played = recorded(*inputs, *parameters)
        for one, other in zip(played, step(layer, parameters, *inputs), strict=True):
            assert torch.equal(one, other)
        assert played[1].abs().max() > 0


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


class Recorded:
    """Forward and backward pass of a model in a CUDA graph, with its inputs at a fixed place."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model, self.ids, self.mask = model, ids.clone(), causal_mask(ids)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile, constants are made
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._run()

    def _run(self) -> Tensor:
        self.model.zero_grad(set_to_none=False)
        loss = loss_of(self.model, self.ids, self.mask)
        loss.backward()
        return loss

    def play(self, ids: Tensor) -> Tensor:
        self.ids.copy_(ids)
        self.graph.replay()
        return self.loss


def on_cuda(scheme: str) -> nn.Module:
    model = get_metis_model(llama(), MetisConfig(scheme=scheme))
    model.set_attn_implementation("eager")  # the same kernels, and the same sums, at each step
    return model.cuda().train()


def causal_mask(ids: Tensor) -> Tensor:
    """Make what transformers takes as it is, [1 1 s s], added to the products of q and k.

    One that transformers makes itself is copied from the CPU, which no recording may do.
    """
    length = ids.shape[-1]
    mask = torch.full((1, 1, length, length), float("-inf"), device=ids.device)
    return mask.triu_(1)


def loss_of(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss


def test_the_mask_is_the_causal_one() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    wanted = model(input_ids=ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss_of(model, ids, causal_mask(ids)), wanted)


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """Choose the kernels that a GPU's user gets, where the suite otherwise takes the reference."""
    with use_kernels(None):
        yield


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 64, (2, 16), generator=generator).cuda() for _ in range(3)]


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvidia", "quartet2", "metis"])
def test_a_model_in_a_cuda_graph(scheme, own_kernels) -> None:
    plain, model = on_cuda(scheme), on_cuda(scheme)
    model.load_state_dict(plain.state_dict())
    first, *others = batches()
    recorded = Recorded(model, first)
    for ids in others:
        played = recorded.play(ids)
        plain.zero_grad()
        wanted = loss_of(plain, ids, causal_mask(ids))
        wanted.backward()
        torch.testing.assert_close(played, wanted)
        for one, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad, other.grad)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvidia", "metis"])
def test_a_model_under_reduce_overhead(scheme, own_kernels) -> None:
    plain, model = on_cuda(scheme), on_cuda(scheme)
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, mode="reduce-overhead")
    for ids in batches():
        torch.compiler.cudagraph_mark_step_begin()
        losses = []
        for one in (compiled, plain):
            one.zero_grad()
            loss = loss_of(one, ids, causal_mask(ids))
            loss.backward()
            losses.append(loss.detach().clone())
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
