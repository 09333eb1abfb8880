"""A layer whose kernels fail to compile, each by itself and all: the reference takes over.

test_kernels_triton.py runs this file in Triton's interpreter, where a kernel is refused by name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from metis_hf import MetisConfig, noise
from metis_hf.layers.make import convert_linear
from metis_hf.numerics.kernels import choice, use_kernels

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="in Triton's interpreter only"
)
# Kernels of a layer under each scheme.
KERNELS = {
    "metis": [
        "multiply", "turn", "find_largest", "to_unit_columns", "find_error",
        "find_amax", "quantize", "finish", "hash_both",
    ],
    "quartet2": ["find_amax", "quantize", "unpack"],
    "nvidia": ["find_amax"],
}  # fmt: skip
CASES = [(scheme, name) for scheme, names in KERNELS.items() for name in [*names, "all"]]


def step(scheme: str) -> list[Tensor]:
    """Output and gradients of a layer for BF16 inputs."""
    torch.manual_seed(0)
    config = MetisConfig(scheme=scheme, rank=2, seed=3)
    layer = convert_linear(torch.nn.Linear(32, 32).bfloat16(), config, name="layer")
    x = torch.randn(96, 32, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn(96, 32, dtype=torch.bfloat16))
    assert x.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A process in which nothing has failed, before and after."""
    choice.forget_failures()
    yield
    choice.forget_failures()


@pytest.fixture
def on_triton(monkeypatch) -> Iterator[None]:
    """The automatic choice is Triton's kernels, as beside a GPU."""
    monkeypatch.setattr(choice, "fastest", lambda device: "triton")
    monkeypatch.setattr(noise, "one_launch", choice.noise_backend)
    with use_kernels(None):
        yield


@pytest.mark.parametrize(("scheme", "refused"), CASES)
def test_the_reference_takes_over(scheme, refused, on_triton, monkeypatch) -> None:
    from triton.compiler.errors import CompilationError
    from triton.runtime.interpreter import InterpretedFunction

    with use_kernels("reference"):
        wanted = step(scheme)
    plain, tried = InterpretedFunction.__getitem__, []

    def launcher(kernel, grid):
        name = kernel.fn.__name__
        if refused not in (name, "all"):
            return plain(kernel, grid)

        def fail(**arguments) -> None:
            tried.append(name)
            raise CompilationError(None, None, "no such instruction")

        return fail

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launcher)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(scheme)
        step(scheme)
    said = [str(each.message) for each in caught if "cannot compile" in str(each.message)]
    assert tried
    assert len(said) == len(set(said)) == len(set(tried))
    assert all(any(f"cannot compile {name}:" in each for each in said) for name in tried)
    assert all("no such instruction" in each for each in said)
    for a, b in zip(found, wanted, strict=True):
        # Kernels that multiply add up in another order, and a code may go the other way.
        error = torch.linalg.vector_norm((a - b).float()) / torch.linalg.vector_norm(b.float())
        assert error <= (0 if refused == "all" else 2e-2), float(error)


def test_kernels_that_were_asked_for_raise(monkeypatch) -> None:
    from triton.compiler.errors import CompilationError
    from triton.runtime.interpreter import InterpretedFunction

    def fail(**arguments) -> None:
        raise CompilationError(None, None, "no such instruction")

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda kernel, grid: fail)
    with use_kernels("triton"), pytest.raises(RuntimeError, match=r"cannot compile .*instruction"):
        step("nvidia")
