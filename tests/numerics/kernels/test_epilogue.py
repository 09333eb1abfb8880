"""The epilogue of a GEMM in torch's operations, and what a layer makes of it."""

from __future__ import annotations

import pytest
import torch

from metis_hf import MetisConfig
from metis_hf.layers.make import convert_linear
from metis_hf.numerics.kernels import epilogue
from numerics.helpers import seeded
from numerics.kernels.epilogue_cases import EpilogueCases


class TestOperations(EpilogueCases):
    kernels = "reference"
    device = "cpu"


def test_nothing_to_do_leaves_the_product_alone() -> None:
    out = torch.randn(3, 4)
    before, version = out.clone(), out._version
    epilogue.finish_product(out)
    assert torch.equal(out, before)
    assert out._version == version


@pytest.mark.parametrize(
    ("scheme", "dtype"), [("nvfp4-rne", torch.bfloat16), ("metis", torch.float32)]
)
def test_a_bias_is_added_once_and_last(scheme, dtype) -> None:
    """With and without corrections, which come before it; and it has its gradient."""
    generator = seeded(0)
    linear = torch.nn.Linear(64, 48)
    x = torch.randn(40, 64, generator=generator).to(dtype)
    config = MetisConfig(scheme=scheme)
    module = convert_linear(linear, config, name="layer").to(dtype)
    y = module(x)
    bias = module.bias.detach().clone()
    with torch.no_grad():
        module.bias.zero_()
    without = module(x)
    assert torch.equal(y, without + bias)
    y.sum().backward()
    assert torch.equal(module.bias.grad, torch.full((48,), 40.0, dtype=dtype))
