"""Calls of quantized layers take and refuse inputs as nn.Linear does."""

from __future__ import annotations

import pytest
import torch
from conftest import llama
from torch import nn

from layers.layer_tools import layer_of
from metis_hf import MetisConfig, calibrate, get_metis_model
from metis_hf.layers.attention import AttentionProducts
from metis_hf.layers.packed import PackedLinear, PackedWeight
from metis_hf.training.health import LayerProbe

IN, OUT = 32, 48


def layer(kind, name="model.layers.0.mlp.up_proj"):
    if kind == "packed":
        packed = PackedLinear(IN, OUT, name=name)
        packed.packed = PackedWeight.of(torch.randn(OUT, IN))
        return packed
    made = layer_of(kind, i=IN, o=OUT)[1]
    made.name = name
    return made


@pytest.mark.parametrize("kind", ["nvfp4", "packed"])
class TestLinear:
    def test_dtype_under_autocast(self, kind):
        """Autocast leaves float64 alone, and takes all else."""
        mine, plain = layer(kind), nn.Linear(IN, OUT)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(4, IN, dtype=dtype)
            mine.to(dtype)
            with torch.autocast("cpu", torch.bfloat16):
                expected = plain.to(dtype)(x).dtype
                assert mine(x).dtype is expected
            assert mine(x).dtype is dtype

    def test_the_input_by_name(self, kind):
        mine, x = layer(kind).eval(), torch.randn(4, IN)
        assert torch.equal(mine(input=x), mine(x))

    def test_another_width(self, kind):
        for shape in ((2, 64), (32, 2, 16), (3, 1), ()):
            own = f"width {shape[-1]}" if shape else "no width"
            match = (
                rf"model.layers.0.mlp.up_proj expects inputs of width 32, but this input has {own}"
            )
            with pytest.raises(ValueError, match=match):
                layer(kind)(torch.randn(shape))

    def test_another_kind_of_numbers(self, kind):
        for dtype in (torch.int64, torch.bool, torch.complex64):
            match = rf"up_proj expects inputs of a floating-point dtype, but this input is {dtype}"
            with pytest.raises(ValueError, match=match):
                layer(kind)(torch.ones(2, IN, dtype=dtype))
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=match):
                layer(kind)(torch.ones(2, IN, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_another_dtype_than_the_weight_has(dtype):
    """As nn.Linear refuses it; autocast makes one of all but float64."""
    mine, x = layer("nvfp4"), torch.randn(4, IN, dtype=dtype)
    match = rf"up_proj has a weight of torch.float32, but its input is {dtype}: convert one to"
    with pytest.raises(ValueError, match=match):
        mine(x)
    with torch.autocast("cpu", torch.bfloat16):
        if dtype is torch.bfloat16:
            assert mine(x).dtype is torch.bfloat16
        else:
            with pytest.raises(ValueError, match=match):
                mine(x)


def test_attention_in_float64_under_autocast():
    products = AttentionProducts(MetisConfig(scheme="nvfp4", attention="nvfp4-rne"), "attention")
    q, k, v = (torch.randn(1, 2, 16, 16, dtype=torch.float64) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = products.attend(q, k, v, scaling=0.25)
    assert y.dtype is torch.float64


class ByName(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(input=x)


def test_what_watches_inputs_takes_them_by_name():
    """Calibration and measurements of health."""
    model = get_metis_model(llama(1), MetisConfig(scheme="w4a4"))
    mlp = model.model.layers[0].mlp
    mlp.up_proj = ByName(mlp.up_proj)
    ids = torch.arange(32)[None]
    assert calibrate(model, [ids])["model.layers.0.mlp.up_proj.inner"].largest > 0
    probe = LayerProbe()
    probe.attach({"up": mlp.up_proj.inner})
    model.train()(ids, labels=ids).loss.backward()
    assert probe.stats["up"]["activation"]
