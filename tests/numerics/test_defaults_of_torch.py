"""Results do not depend on the dtype and the device that torch makes tensors with by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from metis_hf import MetisConfig, scheme_names
from metis_hf.layers.make import convert_linear
from metis_hf.numerics import fake_quantize, quantize
from metis_hf.numerics.kernels import use_kernels
from numerics.cases import FORMAT_NAMES, MIXED_FORMATS, assert_same_bits
from numerics.helpers import normal
from numerics.kernels.kernel_tools import needs_compiler

DTYPES = [torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(params=DTYPES, ids=str)
def default_dtype(request) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_formats(default_dtype) -> None:
    x = normal(20, 48)
    formats = [*FORMAT_NAMES, *MIXED_FORMATS]
    wanted = [fake_quantize(x, fmt) for fmt in formats]
    torch.set_default_dtype(default_dtype)
    for fmt, values in zip(formats, wanted, strict=True):
        assert_same_bits(fake_quantize(x, fmt), values)
        assert_same_bits(quantize(x, fmt).dequantize(), values)


@needs_compiler
def test_compiled(default_dtype) -> None:
    x = normal(16, 64)
    wanted = fake_quantize(x)
    torch.set_default_dtype(default_dtype)
    with use_kernels("compiled"):
        assert_same_bits(fake_quantize(x), wanted)


def test_layers_on_another_default_device() -> None:
    """A script may make its tensors on a GPU; what is on the CPU stays there."""

    def gradient(scheme: str) -> torch.Tensor:
        torch.manual_seed(0)
        with torch.device("cpu"):
            linear = nn.Linear(64, 48)
            x = torch.randn(20, 64)
        layer = convert_linear(linear, MetisConfig(scheme=scheme, rank=8), name="layer").train()
        layer(x).square().sum().backward()
        return layer.weight_params()[-1].grad

    for scheme in scheme_names():
        wanted = gradient(scheme)
        with torch.device("meta"):
            found = gradient(scheme)
        assert found.device.type == "cpu", scheme
        assert torch.equal(found, wanted), scheme
