"""Formats whose blocks take one of two element formats, against the scalar reference."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from design import cases

from metis_hf.noise import Key, uniform
from metis_hf.numerics import (
    E2M1,
    E2M3,
    IF4,
    MIXFP4,
    NVFP4,
    SCALE_E4M3,
    SCALE_E8M0,
    BlockFormat,
    IntFormat,
    MixedFormat,
    Quantizer,
    fake_quantize,
    kernels,
    quantize,
)
from metis_hf.numerics.kernels import pack, unpack, use_kernels
from metis_hf.numerics.storage import unpack as unpacked
from numerics.cases import assert_same_bits, fp32
from numerics.helpers import seeded

FORMATS = {"if4": IF4, "mixfp4": MIXFP4}
INT4 = IntFormat("int4", 4)


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Blocks of all kinds: flat, normal, with an outlier, tiny, and zero."""
    x = torch.randn(*shape, generator=seeded(seed))
    x[::5] *= torch.rand(shape[1], generator=seeded(seed + 1))
    x[1::5] = x[1::5].clamp(-0.5, 0.5)
    x[2::5, ::16] *= 12
    x[3::7] *= 1e-4
    x[4::9, :16] = 0
    return x


def of_reference(x: torch.Tensor, fmt: str, **options) -> torch.Tensor:
    return fp32(reference.fake_quantize(x.numpy(), fmt, **options).values)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dim": 0, "scale_rounding": "up"},
        {"tile": "square", "two_level": False},
        {"scale_rule": "unbiased", "two_level": False, "scale_rounding": "up"},
    ],
    ids=str,
)
def test_values_are_the_references(fmt, options):
    x = tensor(37, 70)
    wanted = of_reference(x, fmt, **options)
    found = fake_quantize(x, fmt, **options)
    assert torch.equal(found, wanted)
    assert_same_bits(quantize(x, fmt, **options).dequantize(), found)


@cases(
    {"fmt": FORMATS, "tile, dim": [("row", -1), ("row", 0), ("square", -1)]},
    rotated={"rounding": ["nearest", "stochastic"], "dtype": [torch.float32, torch.bfloat16]},
)
def test_packed_codes_give_the_same_values(fmt, tile, dim, rounding, dtype):
    """There and back in one go, by codes for the backward pass, and by codes for a file."""
    x, quantizer = tensor(37, 70), Quantizer(fmt, rounding, tile=tile)
    key = Key(3)
    packed = pack(x, quantizer, dim=dim, key=key)
    direct = quantizer(x, dim=dim, key=key, dtype=dtype)
    assert_same_bits(unpack(packed, quantizer, dim=dim, shape=(37, 70), dtype=dtype), direct)
    values, scale = quantizer.unscaled(x, dim=dim, key=key, dtype=dtype)
    apart = unpack(packed, quantizer, dim=dim, shape=(37, 70), dtype=dtype, scaled=False)
    assert_same_bits(apart, values)
    assert torch.equal(scale, packed.global_scale)
    assert packed.scale.float().signbit().any()
    assert not packed.scale.float().signbit().all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_stochastic_rounding_goes_up_as_often_as_the_noise_says(fmt):
    """In units of the block's own codes, by the noise of each element."""
    x, key = tensor(32, 64, seed=3), Key(5)
    quantizer = Quantizer(fmt, "stochastic", scale_rule="unbiased")
    blocks = quantizer.blocks(x.clone(), key=key)
    is_int = blocks.scale.signbit()
    nearest = Quantizer(fmt, scale_rule="unbiased").blocks(x.clone())
    assert torch.equal(nearest.scale, blocks.scale)  # the choice does not depend on the noise
    unit = torch.where(is_int, 6 / 7 if fmt == "if4" else 1.0, 1.0)
    step = (blocks.scale.abs() * unit).double() * blocks.global_scale.double()
    y = (x.unflatten(-1, (-1, 16)).double() / step.clamp(min=1e-30)).abs()
    noise = uniform(x.shape, key, x.device).unflatten(-1, (-1, 16))
    spacing = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0))
    spacing = torch.where(is_int, 1.0, spacing)
    below = (y / spacing).floor()
    wanted = (below + (noise < y / spacing - below)) * spacing
    close = ((y / spacing - below) - noise).abs() < 1e-5  # fp32 may have either
    assert close.double().mean() < 1e-3
    kept = ~close & (y <= torch.where(is_int, 7, 6))  # tiny blocks clip: their scales are 2^-9
    assert kept.double().mean() > 0.8
    assert torch.equal(blocks.codes.abs().double()[kept], wanted[kept])


def test_codes_and_signs_by_hand():
    """Sevenths go to integers; amax 6 beside halves and powers goes to E2M1."""
    even = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, -1, -2, -3, -4, -5, -6, -7, 0, 7])
    rough = torch.tensor([6.0, 4, 3, 2, 1.5, 1, 0.5, 0, -0.5, -1, -1.5, -2, -3, -4, -6, 6])
    for fmt, scale in ((IF4, 448 * 6 / 7), (MIXFP4, 384.0)):
        q = quantize(torch.stack([even * 6 / 7, rough]), fmt)  # amax 6 in both
        assert q.scale.float().signbit().tolist() == [[True], [False]]
        assert q.scale[1].item() == 448
        codes = unpacked(q.codes, 4)
        assert_same_bits(INT4.decode(codes[0]), even + 0.0)
        assert_same_bits(E2M1.decode(codes[1]), rough)
        exact = 448 if fmt == IF4 else scale
        assert q.scale[0].item() == -exact
        torch.testing.assert_close(q.dequantize()[1], rough, rtol=1e-6, atol=0)
        torch.testing.assert_close(q.dequantize()[0], even * 6 / 7, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_tie_goes_to_e2m1(fmt):
    """Zero, and one magnitude alone, which both formats hold equally well."""
    x = torch.zeros(3, 16)
    x[1, 3] = -2.5
    x[2] = 2.5
    if fmt == "mixfp4":
        x[1:] *= 0  # its two scales are rounded apart
    q = quantize(x, fmt)
    assert not q.scale.float().signbit().any()
    assert_same_bits(q.dequantize(), fake_quantize(x, "nvfp4"))


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_not_finite_shows(fmt):
    x = tensor(4, 32)
    for bad in (math.nan, math.inf, -math.inf):
        x[1, 5] = bad
        assert fake_quantize(x, fmt).isnan().all()
        one = fake_quantize(x, fmt, two_level=False).isnan()
        assert one.sum() == 16
        assert one[1, :16].all()
        assert_same_bits(quantize(x, fmt).dequantize(), fake_quantize(x, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_saturation_is_of_either_grid(fmt):
    """Scales rounded up hold every element; to nearest, some blocks clip their largest ones."""
    x = torch.randn(64, 64, generator=seeded(9))
    assert Quantizer(fmt, scale_rounding="up", two_level=False).saturated(x) == 0
    found = Quantizer(fmt).saturated(x).item()
    assert 0.01 < found < 0.06  # half of the blocks, about one element of sixteen


@pytest.mark.parametrize("fmt", FORMATS)
def test_kernels_give_way_to_the_definition(fmt, monkeypatch):
    """No kernel covers them: what is asked for makes no difference."""
    x, quantizer = tensor(64, 64), Quantizer(fmt, "stochastic")
    with use_kernels("reference"):
        wanted = quantizer(x, key=7)
    monkeypatch.setattr(kernels.cpu, "run", lambda *args, **tensors: pytest.fail("a kernel ran"))
    with use_kernels("compiled"):
        assert_same_bits(quantizer(x, key=7), wanted)
    compiled = torch.compile(lambda t: quantizer(t, key=7), backend="eager", fullgraph=True)
    with use_kernels(None):
        assert_same_bits(compiled(x), wanted)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_given_amax_is_the_tensors(fmt):
    x = tensor(32, 32)
    amax = x.abs().amax() * 1.5
    wanted = of_reference(x, fmt, amax=amax.item())
    assert torch.equal(fake_quantize(x, fmt, amax=amax), wanted)


def test_one_format_is_what_a_mixed_one_of_equals_would_be():
    """Two times E2M1: ties everywhere, so that it is NVFP4."""
    twice = BlockFormat("twice", MixedFormat("twice", (E2M1, E2M1)), SCALE_E4M3, 16)
    x = tensor(32, 48)
    assert_same_bits(fake_quantize(x, twice), fake_quantize(x, NVFP4))
    assert not quantize(x, twice).scale.float().signbit().any()


class TestRefusals:
    def test_scales_without_a_sign(self):
        mixed = MixedFormat("mixed", (E2M1, INT4))
        with pytest.raises(ValueError, match=r"mixes two element formats.*e8m0.*use SCALE_E4M3"):
            BlockFormat("bad", mixed, SCALE_E8M0, 32)

    def test_formats_of_different_sizes(self):
        with pytest.raises(ValueError, match=r"e2m1 \(4 bits\) and e2m3 \(6 bits\).*equal width"):
            MixedFormat("mixed", (E2M1, E2M3))

    @pytest.mark.parametrize("rule", ["four-over-six", "search", "eden"])
    def test_rules_that_compare_scales(self, rule):
        with pytest.raises(ValueError, match=rf'"{rule}".*if4; use scale_rule="absmax"'):
            Quantizer("if4", scale_rule=rule)
