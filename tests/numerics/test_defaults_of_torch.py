"""Results do not depend on the dtype and the device that torch makes tensors with by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from metis_hf import MetisConfig, scheme_names
from metis_hf.layers.make import convert_linear
from metis_hf.numerics import Quantizer, fake_quantize, quantize
from metis_hf.numerics.kernels import use_kernels
from numerics.cases import FORMAT_NAMES, MIXED_FORMATS, assert_same_bits
from numerics.helpers import normal
from numerics.kernels.test_kernels import needs_compiler, traced

DTYPES = [torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(params=DTYPES, ids=str)
def default_dtype(request) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fmt", [*FORMAT_NAMES, *MIXED_FORMATS])
def test_formats(fmt, default_dtype) -> None:
    x = normal(20, 48)
    wanted = fake_quantize(x, fmt)
    torch.set_default_dtype(default_dtype)
    assert_same_bits(fake_quantize(x, fmt), wanted)
    assert_same_bits(quantize(x, fmt).dequantize(), wanted)


@pytest.mark.parametrize("rule", ["absmax", "four-over-six", "search", "eden", "unbiased"])
def test_what_compilers_start_from(rule, default_dtype) -> None:
    x = normal(16, 64)
    quantizer = Quantizer(scale_rule=rule)
    wanted = traced(quantizer, x)
    torch.set_default_dtype(default_dtype)
    assert_same_bits(traced(quantizer, x), wanted)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("default_dtype", [torch.bfloat16], indirect=True)
def test_compiled(default_dtype, monkeypatch, tmp_path) -> None:
    """Made under another default; what is kept on disk serves processes that have theirs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("metis_hf.numerics.kernels.compiled._kernels", {})
    monkeypatch.setattr("metis_hf.numerics.kernels.ahead._rehearsals", {})  # of other tests' layers
    x = normal(16, 64)
    wanted = fake_quantize(x)
    torch.set_default_dtype(default_dtype)
    with use_kernels("compiled"):
        assert_same_bits(fake_quantize(x), wanted)


@pytest.mark.parametrize("scheme", scheme_names())
def test_layers_on_another_default_device(scheme) -> None:
    """A script may make its tensors on a GPU; what is on the CPU stays there."""

    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        with torch.device("cpu"):
            linear = nn.Linear(64, 48)
            x = torch.randn(20, 64)
        layer = convert_linear(linear, MetisConfig(scheme=scheme, rank=8), name="layer").train()
        layer(x).square().sum().backward()
        return layer.weight_params()[-1].grad

    wanted = gradient()
    with torch.device("meta"):
        found = gradient()
    assert found.device.type == "cpu"
    assert torch.equal(found, wanted)
