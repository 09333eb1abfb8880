"""What a quantized layer cannot do is said, with a way out; what it can do still runs."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.autograd import forward_ad

from layers.layer_tools import layer_of
from metis_hf import to_dense
from metis_hf.layers.parallelism import check_accelerate


@pytest.fixture
def layer():
    return layer_of("metis", i=64, o=48, name="model.up_proj")[1]


@pytest.fixture
def x():
    return torch.randn(40, 64)


def test_jit_trace(layer, x):
    with pytest.raises(NotImplementedError, match=r"jit.trace .* of model.up_proj.*to_dense"):
        torch.jit.trace(layer, (x,))


TRANSFORMS = (
    lambda layer, x: torch.func.vmap(layer)(x[None]),
    lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    lambda layer, x: torch.func.vjp(layer, x),
)


def test_transforms_of_functions(layer, x):
    for transform in TRANSFORMS:
        with pytest.raises(NotImplementedError, match=r"model.up_proj inside torch.func.*to_dense"):
            transform(layer, x)


@pytest.mark.parametrize("dual", ["input", "weight"])
def test_forward_mode(layer, x, dual):
    with forward_ad.dual_level():
        layer(x)  # a level alone is no tangent
        params = dict(layer.named_parameters())
        if dual == "input":
            x = forward_ad.make_dual(x, x)
        else:
            params = {name: forward_ad.make_dual(p, p) for name, p in params.items()}
        with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
            torch.func.functional_call(layer, params, (x,))


@pytest.mark.parametrize("where", ["weight", "both", "input"])
def test_meta_device(layer, x, where):
    if where != "input":
        layer = copy.deepcopy(layer).to("meta")
    if where != "weight":
        x = x.to("meta")
    what = "the weight" if where == "weight" else "the input"
    with pytest.raises(ValueError, match=f"{what} of model.up_proj is on the meta device"):
        layer(x)


def test_second_derivatives(layer, x):
    x.requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivatives .*high_precision=.*to_dense"):
        first.sum().backward()


def test_first_derivatives_with_a_graph(layer, x):
    """Asking for a graph that is not used is allowed, and the gradients are those without."""
    x.requires_grad_()
    found = [
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=graph)[0]
        for graph in (False, True)
    ]
    assert torch.equal(*found)


def test_batched_gradients(layer, x):
    x.requires_grad_()
    y = layer(x)
    with pytest.raises(NotImplementedError, match="batched gradients"):
        torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)


def test_the_ways_out(layer, x):
    """What the errors advise works."""
    model = to_dense(torch.nn.Sequential(copy.deepcopy(layer)))
    torch.jit.trace(model, (x,))
    torch.func.vmap(model)(x[None])
    torch.func.jvp(model, (x,), (x,))
    config = layer.config.replace(high_precision=("forward", "backward"))
    layer.set_config(config)
    x.requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.func.vmap(layer)(x[None]).shape == (1, 40, 48)


def test_a_version_of_accelerate_that_knows_one_of_the_two(monkeypatch):
    """1.10 and 1.11 have context parallelism alone."""
    config = SimpleNamespace(cp_size=1)
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", config)
    check_accelerate()
    config.cp_size = 2
    with pytest.raises(NotImplementedError, match="context parallelism"):
        check_accelerate()
