"""What torch.compile traces of a quantizer or a rotation is all on the tensor's own device.

A constant that is made on the CPU becomes a part of a GPU's graph: it is copied at each step, which
keeps the graph from being recorded, and Inductor has failed to move it. Meta tensors stand for
those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from design import cases
from torch import Tensor
from torch.fx import GraphModule

from metis_hf import noise
from metis_hf.numerics import FORMATS, Quantizer
from metis_hf.numerics.kernels import use_kernels
from metis_hf.transforms import rotate, unrotate
from metis_hf.transforms.hadamard import rotate_groups, unrotate_groups

META = torch.device("meta")


def devices(traced: Callable[[Tensor], Tensor]) -> set[torch.device]:
    """Return where the tensors of a function's graph are, for an input without storage.

    Dynamo raises for a tensor that is made of numbers, which would be on the CPU first.
    """
    found: set[torch.device] = set()

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor):
                found.add(value.device)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(traced, backend=backend, fullgraph=True)(torch.empty(96, 64, device=META))
    return found


def key() -> noise.Key:
    return noise.Key(5, torch.zeros((), dtype=torch.int32, device=META))


def signs(x: Tensor) -> Tensor:
    return 1.0 - 2.0 * (noise.random_bits(64, key(), x.device) < 0)


ROTATIONS = {
    "blocks, signs": lambda x: rotate(x, dim=0, seed=3),
    "blocks, no signs": lambda x: unrotate(x, dim=1, seed=None),
    "groups": lambda x: rotate_groups(x, signs(x), dim=1),
    "groups, back": lambda x: unrotate_groups(x, signs(x), dim=1),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_rotation(name) -> None:
    assert devices(ROTATIONS[name]) == {META}


@cases(
    {"fmt": ["nvfp4", "mxfp4", "if4", "mixfp4", "ufp4"]},
    rotated={"kernels": [None, "reference"], "rounding": ["nearest", "stochastic"]},
)
def test_a_quantizer(fmt, rounding, kernels) -> None:
    with use_kernels(kernels):
        assert devices(lambda x: Quantizer(FORMATS[fmt], rounding)(x, key=key())) == {META}


def test_a_constant_of_the_host_shows() -> None:
    assert devices(lambda x: x * torch.ones(64, device="cpu").to(x.device)) > {META}
