"""Codebook formats: rounding, storage and scales, against a search through the list in float64."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

from metis_hf.numerics import (
    SCALE_E8M0,
    SCALE_FP32,
    BlockFormat,
    CodebookFormat,
    Quantizer,
    dequantize,
    fake_quantize,
    get_format,
    quantize,
    register_format,
    sqnr_db,
)
from metis_hf.numerics import formats as formats_module
from metis_hf.numerics.rounding import round_nearest, round_stochastic

# NormalFloat4, the table of the bitsandbytes library (QLoRA, arXiv 2305.14314, appendix E).
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
NF4_ELEMENT = CodebookFormat("nf4", NF4_VALUES)
NF4 = BlockFormat("nf4", NF4_ELEMENT, SCALE_FP32, 64, "arXiv 2305.14314")
TERNARY = CodebookFormat("ternary", (-1, 0, 1))
UNEVEN = CodebookFormat("uneven", (-1, 0, 0.5, 4))


def nearest(y: float, values: tuple[float, ...]) -> float:
    """Return the nearest value, on a tie the one at the even place, by exact arithmetic."""
    places = range(len(values))
    return values[min(places, key=lambda i: (abs(Fraction(y) - Fraction(values[i])), i % 2))]


@pytest.mark.parametrize("fmt", [NF4_ELEMENT, TERNARY, UNEVEN], ids=lambda fmt: fmt.name)
def test_nearest_is_the_nearest_of_the_list(fmt):
    values = torch.tensor(fmt.values, dtype=torch.float32)
    middles = (values[1:] + values[:-1]) / 2
    edges = torch.cat([values, middles, middles.nextafter(middles + 1)])
    y = torch.cat([edges, torch.randn(500).clamp(-fmt.max, fmt.max)])
    fp32 = tuple(values.tolist())
    expected = [nearest(number, fp32) for number in y.tolist()]
    found = round_nearest(y, fmt)
    wrong = found != torch.tensor(expected)
    # Off by a rounding of `way`, a number near a middle may go either way: both values are as near.
    ties = 0 if fmt is NF4_ELEMENT else len(middles)  # of few bits: exact, and to the even place
    assert not wrong[: len(values) + ties].any()
    distance = (found - y).abs() - (torch.tensor(expected) - y).abs()
    assert (distance.abs() <= 2**-23 * fmt.max).all()
    assert torch.equal(round_nearest(values, fmt), values)


@pytest.mark.parametrize("rounding", ["floor", "up", "nearest"])
def test_nothing_finite_gives_nan(rounding):
    """Of a codebook that ends at 1 or below, the largest scale cannot bring FLT_MAX to the end."""
    scale = SCALE_FP32 if rounding == "nearest" else SCALE_E8M0
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([0.0, 1.0, largest / 2, largest]).repeat(8)[None]
    for values, sign in itertools.product([(-0.25, 0, 0.25), NF4_VALUES], (1, -1)):
        fmt = BlockFormat("small", CodebookFormat("small", values), scale, 32)
        found = fake_quantize(sign * x, fmt, scale_rounding=rounding)
        assert found.isfinite().all()
        assert (found[:, 3::4] * sign >= largest / 8).all()
        assert torch.equal(quantize(sign * x, fmt, scale_rounding=rounding).dequantize(), found)


def test_stochastic_rounding_is_unbiased_and_keeps_values():
    y = torch.linspace(-1, 1, 41)
    noise = (torch.arange(4096) + 0.5) / 4096  # each share of the interval once
    draws = round_stochastic(
        y.expand(4096, 41).contiguous(), NF4_ELEMENT, noise[:, None].expand(4096, 41)
    )
    assert (draws.mean(0) - y).abs().max() < 2 / 4096
    values = torch.tensor(NF4_VALUES)
    assert torch.equal(round_stochastic(values, NF4_ELEMENT, torch.zeros(16)), values)


def test_ends_and_nan():
    y = torch.tensor([-4.0, -1.5, 4.0, math.nan])  # the codebook has one end nearer than the other
    for found in (round_nearest(y, UNEVEN), round_stochastic(y, UNEVEN, torch.full((4,), 0.5))):
        assert found[:3].tolist() == [-1, -1, 4]
        assert found[3].isnan()


def test_stored_values_are_the_computed_ones():
    x = torch.randn(8, 128)
    stored = quantize(x, NF4)
    assert stored.codes.shape == (8, 64)  # two codes to a byte
    assert torch.equal(dequantize(stored), fake_quantize(x, NF4))
    assert NF4.bits_per_element == 4.5


def test_quantizes_by_blocks():
    """Block by block: amax to 1, the nearest value, and back."""
    x = torch.randn(4, 128)
    found = fake_quantize(x, NF4)
    drawn = Quantizer(NF4, rounding="stochastic")(x, key=1)
    assert (x - found).norm() < (x - drawn).norm() < 0.2 * x.norm()
    for row, quantized in zip(x, found):
        for block, hat in zip(row.split(64), quantized.split(64)):
            scale = block.abs().max().item()
            expected = [nearest(number / scale, NF4_VALUES) * scale for number in block.tolist()]
            torch.testing.assert_close(hat, torch.tensor(expected), rtol=1e-5, atol=0)


def test_is_made_for_normal_values():
    """Better than evenly spaced integers in the same bits where values are normal."""
    x = torch.randn(256, 1024)
    even = BlockFormat("even", CodebookFormat("even", tuple(range(-7, 8))), SCALE_FP32, 64)
    assert sqnr_db(x, fake_quantize(x, NF4)) > sqnr_db(x, fake_quantize(x, even)) + 0.5
    int4 = BlockFormat("int4-64", formats_module.INT4_ELEMENT, SCALE_FP32, 64)
    assert torch.equal(fake_quantize(x, even), fake_quantize(x, int4))


@pytest.mark.parametrize(
    "values", [(1, 0), (0.5, 1), (0,), (0, math.nan), (0, math.inf), (-math.inf, 0, 1)]
)
def test_refused_codebooks(values):
    with pytest.raises(ValueError, match="ascending order, including 0"):
        CodebookFormat("bad", values)


def test_saturation_is_told_by_each_end():
    """What lies beyond the shorter end becomes that end."""
    x = torch.tensor([[-1.0, *[0.9] * 15]])
    uneven = BlockFormat(
        "uneven", CodebookFormat("uneven", (-1, -0.5, 0, 0.5, 0.7)), SCALE_FP32, 16
    )
    assert fake_quantize(x, uneven)[0, 1:].tolist() == pytest.approx([0.7] * 15)
    assert Quantizer(uneven).saturated(x) == 15 / 16
    assert Quantizer(uneven).saturated(-x) == 1 / 16
    assert Quantizer(NF4).saturated(x.repeat(1, 4)) == 0


def test_registered_formats_have_names(monkeypatch):
    monkeypatch.setattr(formats_module, "FORMATS", dict(formats_module.FORMATS))
    assert register_format(NF4) is NF4
    assert register_format(NF4) is NF4
    assert get_format("nf4") is NF4
    with pytest.raises(ValueError, match="'nvfp4' already exists"):
        register_format(BlockFormat("nvfp4", NF4_ELEMENT, SCALE_FP32, 16))
