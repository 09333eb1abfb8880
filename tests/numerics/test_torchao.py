"""Agreement with torchao's NVFP4 and MX casts, bit for bit, and each place where they part.

The disagreements assert what both sides do: should torchao change, the test says which one it was.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import reference_formats as formats
import torch
from torch import Tensor

from metis_hf.numerics import fake_quantize, get_format, quantize
from metis_hf.numerics.storage import unpack
from numerics import torchao_oracle as oracle
from numerics.cases import MX_FORMATS, assert_same_bits, label
from numerics.helpers import normal, seeded

ELEMENT_DTYPES = {
    "mxfp4": torch.float4_e2m1fn_x2,
    "mxfp8-e4m3": torch.float8_e4m3fn,
    "mxfp8-e5m2": torch.float8_e5m2,
}
MODES = {"floor": "FLOOR", "up": "RCEIL", "even": "EVEN"}  # of ScaleCalculationMode
BF16_TIES = 0.01  # share of a bf16 tensor's scales or codes that may be exact ties
SMALLEST_SCALE = 2.0**-6  # torchao clamps E4M3 block scales to the smallest normal value


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def torchao_nvfp4(x: Tensor, two_level: bool) -> tuple[Tensor, Tensor]:
    """(block scales, packed codes)."""
    tensor_scale = oracle.per_tensor_amax_to_scale(x.abs().max()) if two_level else None
    return oracle.nvfp4_quantize(x, 16, tensor_scale)


def nvfp4_values(scale: Tensor, packed: Tensor) -> Tensor:
    """code * scale, without the tensor scale."""
    codes = oracle.f4_unpacked_to_f32(oracle.unpack_uint4(packed)).unflatten(-1, (-1, 16))
    return (codes * scale.float()[..., None]).flatten(-2)


def torchao_mx(x: Tensor, fmt: str, scale_rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    """(scale bytes, code bytes, fp32 values); FP4 codes packed, FP6 codes one to a byte."""
    six_bits = {"mxfp6-e2m3": oracle.DTYPE_FP6_E2M3, "mxfp6-e3m2": oracle.DTYPE_FP6_E3M2}
    dtype = (ELEMENT_DTYPES | six_bits)[fmt]
    mode = oracle.ScaleCalculationMode[MODES[scale_rounding]]
    scale, codes = oracle.to_mx(x, dtype, 32, mode)
    values = oracle.to_dtype(codes, scale, dtype, 32, torch.float32)
    return scale.view(torch.uint8), codes.view(torch.uint8), values


def our_mx(x: Tensor, fmt: str, scale_rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    q = quantize(x.float(), fmt, scale_rounding=scale_rounding)
    codes = unpack(q.codes, 6) if q.fmt.element.bits == 6 else q.codes
    return q.scale.view(torch.uint8), codes, q.dequantize()


BOTH_LEVELS = pytest.mark.parametrize("two_level", [True, False], ids=["two_level", "one_level"])
EVERY_SCALE = pytest.mark.parametrize("scale_rounding", list(MODES))
EVERY_MX = pytest.mark.parametrize("fmt", MX_FORMATS)


# --- agreement -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "two_level"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)],
    ids=label,
)
def test_nvfp4_codes_and_scales_are_identical(dtype, two_level) -> None:
    """On N(0, 1), in the packed bytes. bf16 with a tensor scale: see below."""
    x = gaussian(128, 256, dtype=dtype)
    scale, packed = torchao_nvfp4(x, two_level)
    q = quantize(x, two_level=two_level)
    assert torch.equal(q.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(q.codes, packed)


@EVERY_MX
@EVERY_SCALE
def test_mx_codes_scales_and_values_are_identical(fmt, scale_rounding) -> None:
    """FLOOR is "floor", RCEIL is "up" and EVEN is "even"."""
    for rows in (gaussian(64, 128), normal(64, 128)):
        for x in (rows, rows.bfloat16()):
            scale, codes, values = torchao_mx(x, fmt, scale_rounding)
            our_scale, our_codes, our_values = our_mx(x, fmt, scale_rounding)
            assert len(scale.unique()) > 2
            assert torch.equal(our_scale, scale)
            assert torch.equal(our_codes, codes)
            assert_same_bits(our_values, values)
    x[0, 3] = math.nan
    scale, _, values = torchao_mx(x, fmt, scale_rounding)
    our_scale, _, our_values = our_mx(x, fmt, scale_rounding)
    assert scale[0, 0] == 255
    assert torch.equal(our_scale, scale)
    assert_same_bits(our_values, values)


# --- named disagreements: NVFP4 ------------------------------------------------------------------


def test_torchao_breaks_the_ties_of_two_level_bf16_data_otherwise() -> None:
    """Scales are (amax / 6) / t there, t = amax_tensor / 2688; here amax * (S * (1/6)), S = 1 / t.

    Elements are multiplied by (1 / t) / scale there, by 1 / (scale * (1 / S)) here, which is
    TransformerEngine's order. Both round more than once. bf16 data over the tensor's amax gives
    exact ties, between two scales or two codes, and the rounding errors decide them: everything
    that differs is such a tie in exact arithmetic.
    """
    scale_ties = {Fraction(tie) for tie in formats.midpoints(formats.E4M3_GRID)}
    code_ties = {Fraction(tie) for tie in formats.midpoints(formats.E2M1_GRID)}
    scales_apart, codes_apart, elements = 0, 0, 0
    for seed in range(12):
        x = gaussian(128, 256, dtype=torch.bfloat16, seed=seed).float()
        scale, packed = torchao_nvfp4(x, two_level=True)
        q = quantize(x)
        top = Fraction(x.abs().max().item())

        apart = scale.view(torch.uint8) != q.scale.view(torch.uint8)
        amax = x.abs().unflatten(-1, (-1, 16)).amax(-1)
        assert all(Fraction(a) * 448 / top in scale_ties for a in amax[apart].tolist())

        differ = unpack(packed, 4) != unpack(q.codes, 4)
        differ &= ~apart.repeat_interleave(16, -1)
        own_scale = scale.float().repeat_interleave(16, -1)[differ].tolist()
        for value, block in zip(x[differ].abs().tolist(), own_scale):
            assert Fraction(value) * 2688 / (Fraction(block) * top) in code_ties
        scales_apart, codes_apart = scales_apart + int(apart.sum()), codes_apart + int(differ.sum())
        elements += x.numel()
    assert 0 < scales_apart < BF16_TIES * elements / 16
    assert 0 < codes_apart < BF16_TIES * elements


@BOTH_LEVELS
def test_torchao_clamps_block_scales_at_2_to_the_minus_6(two_level) -> None:
    """E4M3 has subnormals down to 2^-9, which a tensor with rows of very different size needs.

    torchao takes the smallest normal instead: small blocks keep fewer codes, or none. Other blocks
    are identical.
    """
    rows = torch.exp2(torch.linspace(-18, 2, 64))[:, None]
    x = gaussian(64, 64) * rows
    scale, packed = torchao_nvfp4(x, two_level)
    q = quantize(x, two_level=two_level)
    ours = q.scale.float()
    small = ours < SMALLEST_SCALE
    assert small.any()
    assert (~small).any()
    assert (ours[small] > 0).any()  # subnormal scales that torchao does not use
    assert (scale.float()[small] == SMALLEST_SCALE).all()
    assert torch.equal(scale.float()[~small], ours[~small])
    same = ~small.repeat_interleave(8, dim=-1)
    assert torch.equal(packed[same], q.codes[same])
    assert not torch.equal(packed[~same], q.codes[~same])


def test_torchao_loses_small_one_level_tensors_earlier() -> None:
    """Every block of 0.01 * N(0, 1) meets the clamp: 2^-6 where amax / 6 is some 2^-8."""
    x = gaussian(64, 64) * 0.01
    scale, packed = torchao_nvfp4(x, two_level=False)
    assert scale.float().unique().tolist() == [SMALLEST_SCALE]
    assert set(quantize(x, two_level=False).scale.float().unique().tolist()) <= {
        step * 2.0**-9 for step in (1, 2, 3, 4)
    }
    theirs = (nvfp4_values(scale, packed) - x).square().mean()
    ours = (fake_quantize(x, two_level=False) - x).square().mean()
    assert theirs > 2 * ours


def test_torchao_makes_an_all_zero_two_level_tensor_nan() -> None:
    """Its tensor scale is amax / 2688 = 0 and block scales are 0 / 0; ours are 1 and 0."""
    x = torch.zeros(2, 32)
    scale, _ = torchao_nvfp4(x, two_level=True)
    assert scale.float().isnan().all()
    q = quantize(x)
    assert (q.scale.float() == 0).all()
    assert q.global_scale == 1
    assert_same_bits(q.dequantize(), x)


# --- named disagreements: MX ---------------------------------------------------------------------

# Exponents around zero are the only ones where fp32 has room between log2(1 + 2^-23) and 0.
RCEIL_EXACT_EXPONENTS = range(-4, 4)


@EVERY_MX
def test_rceil_misses_maxima_just_above_a_power_of_two(fmt) -> None:
    """amax one fp32 step above max * 2^k needs the scale 2^(k+1), or it clips.

    torchao takes ceil(log2(amax / max)) with an fp32 log2, whose result rounds to k unless k is
    small. Here the comparison is exact.
    """
    largest = get_format(fmt).element.max
    exponents = list(range(-100, 101))
    amax = torch.nextafter(
        torch.tensor([largest * 2.0**k for k in exponents]), torch.tensor(math.inf)
    )
    x = torch.zeros(len(amax), 32)
    x[:, 0] = amax
    scale = torchao_mx(x, fmt, "up")[0][:, 0].int() - 127
    ours = our_mx(x, fmt, "up")[0][:, 0].int() - 127
    assert ours.tolist() == [k + 1 for k in exponents]
    assert scale.tolist() == [k + (k in RCEIL_EXACT_EXPONENTS) for k in exponents]


@EVERY_MX
def test_torchao_loses_blocks_with_the_smallest_scale(fmt) -> None:
    """E8M0 code 0 is 2^-127. torchao writes it and divides by another number.

    FLOOR divides by 2^-126, the smallest normal fp32, and the values come back halved. RCEIL
    multiplies by 1, and they come back as zero.
    """
    x = torch.tensor([2.0**-127, 2.0**-126, 1.5 * 2.0**-126])[:, None].expand(3, 32).contiguous()
    for scale_rounding, wanted in (("floor", x / 2), ("up", torch.zeros_like(x))):
        scale, _, values = torchao_mx(x, fmt, scale_rounding)
        assert (scale == 0).all()
        assert_same_bits(values, wanted)
    for scale_rounding in MODES:
        scale, _, values = our_mx(x, fmt, scale_rounding)
        assert (scale == 0).all()
        assert_same_bits(values, x)


@EVERY_MX
def test_torchao_gives_a_block_with_inf_a_finite_scale(fmt) -> None:
    """The infinity becomes the largest code and its neighbours 0; here the block is NaN."""
    x = torch.ones(1, 32)
    x[0, 0] = math.inf
    element = get_format(fmt).element
    for scale_rounding in MODES:
        scale, codes, values = torchao_mx(x, fmt, scale_rounding)
        assert scale.item() < 255
        assert element.decode(unpack(codes, 4) if fmt == "mxfp4" else codes)[0, 0] == element.max
        assert (values[0, 1:] == 0).all()
        scale, _, values = our_mx(x, fmt, scale_rounding)
        assert scale.item() == 255
        assert values.isnan().all()
