"""Block scales: their casts, exact power-of-two rules, and the order of the operations.

Scales are compared with exact integer arithmetic or with ml_dtypes.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import reference_formats as formats
import torch

from metis_hf.numerics import QuantizedTensor, ScaleRounding, get_format, quantize
from metis_hf.numerics.formats import SCALE_E4M3
from metis_hf.numerics.scaling import round_scale
from metis_hf.numerics.storage import unpack
from numerics.cases import MX_FORMATS, assert_same_array, fp32, label, probes
from numerics.helpers import SCALE_ROUNDINGS, seeded

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
BOTH_SCALES = pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)


# --- E4M3 ----------------------------------------------------------------------------------------


def positive_probes() -> np.ndarray:
    x = probes(formats.ELEMENTS["e4m3"])
    return x[~np.signbit(x)]


def test_e4m3_scale_nearest_agrees_with_ml_dtypes() -> None:
    x = positive_probes()
    wanted = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    actual = round_scale(fp32(x), SCALE_E4M3, ScaleRounding.NEAREST)
    assert_same_array(actual.numpy(), wanted)
    assert_same_array(np.array([formats.e4m3_nearest(v) for v in x]), wanted)


def test_e4m3_scale_up_is_the_next_code_at_or_above() -> None:
    x = positive_probes()
    every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wanted = every[np.searchsorted(every, x, side="left")]  # first code with value >= x
    actual = round_scale(fp32(x), SCALE_E4M3, ScaleRounding.UP)
    assert_same_array(actual.numpy(), wanted)
    assert_same_array(np.array([formats.e4m3_up(v) for v in x]), wanted)


@BOTH_SCALES
def test_e4m3_scale_saturates_and_keeps_what_is_not_finite(scale_rounding) -> None:
    x = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e9, FLT_MAX, math.inf, math.nan])
    actual = round_scale(x, SCALE_E4M3, ScaleRounding(scale_rounding))
    assert actual[:6].tolist() == [448.0] * 6
    assert actual[6:].isnan().all()
    cast = {"nearest": formats.e4m3_nearest, "up": formats.e4m3_up}[scale_rounding]
    assert_same_array(np.array([cast(v) for v in x.tolist()]), actual.numpy())


# --- E8M0 ----------------------------------------------------------------------------------------


def test_reference_logarithms_are_exact() -> None:
    for numerator, denominator in [(1, 1), (7, 1), (8, 1), (9, 1), (3, 7), (1, 8), (1, 9), (2, 17)]:
        value = Fraction(numerator, denominator)
        low, high = formats.floor_log2(value), formats.ceil_log2(value)
        assert Fraction(2) ** low <= value < Fraction(2) ** (low + 1)
        assert Fraction(2) ** (high - 1) < value <= Fraction(2) ** high


@functools.lru_cache
def block_maxima(largest: float) -> np.ndarray:
    """Where either rule changes its exponent: 2^k and largest * 2^k, and their fp32 neighbours."""
    powers = [2.0**k for k in range(-149, 128)]
    tops = [largest * 2.0**k for k in range(-149, 128)]
    points = np.array(powers + [v for v in tops if v <= float(FLT_MAX)], np.float32)
    below = np.nextafter(points, F32(0))
    above = np.nextafter(points, F32(np.inf))
    near = np.unique(np.concatenate([points, below, above, [F32(0), FLT_MAX]]))
    return near[np.isfinite(near)].astype(np.float32)


@pytest.mark.parametrize("scale_rounding", ["floor", "up"])
@pytest.mark.parametrize("fmt", MX_FORMATS)
def test_e8m0_scale_is_the_exact_power_of_two(fmt, scale_rounding) -> None:
    """floor(log2 amax) - floor(log2 max) or ceil(log2(amax / max)), not below -127.

    Stored as exponent + 127, which torch and ml_dtypes read alike.
    """
    largest = get_format(fmt).element.max
    amax = block_maxima(largest)
    exponents = np.array([formats.e8m0_exponent(a, largest, scale_rounding) for a in amax])
    assert exponents.min() == -127
    below_top = 127 if scale_rounding == "floor" else 128  # FLT_MAX is just below 2^128
    assert exponents.max() == below_top - math.floor(math.log2(largest))
    scale = quantize(fp32(amax)[:, None], fmt, scale_rounding=scale_rounding).scale[:, 0]
    codes = scale.view(torch.uint8).numpy()
    assert (codes.astype(int) - 127 == exponents).all()
    wanted = np.exp2(exponents.astype(np.float64)).astype(np.float32)
    assert_same_array(codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), wanted)
    assert_same_array(scale.float().numpy(), wanted)


@pytest.mark.parametrize("scale_rounding", ["floor", "up"])
def test_e8m0_scale_of_a_bad_block_is_the_nan_code(scale_rounding) -> None:
    x = torch.ones(4, 32)
    x[1:, 5] = torch.tensor([math.nan, math.inf, -math.inf])
    scale = quantize(x, "mxfp4", scale_rounding=scale_rounding).scale.view(torch.uint8)
    assert scale[:, 0].tolist() == [125, 255, 255, 255]  # 2^-2: 1 becomes 4 in both rules


# --- fp32 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["fp8-e4m3", "fp8-e5m2", "int4"])
def test_fp32_scale_is_the_reciprocal_of_the_saturated_quotient(fmt) -> None:
    """1 / min(max / amax, FLT_MAX), two roundings; 1 for a zero block."""
    largest = get_format(fmt).element.max
    amax = block_maxima(largest)
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(F32(largest) / amax, FLT_MAX)
        wanted = np.where(amax == 0, F32(1), F32(1) / encode)
    scale = quantize(fp32(amax)[:, None], fmt).scale[:, 0]
    assert scale.dtype == torch.float32
    assert_same_array(scale.numpy(), wanted)
    assert (encode == FLT_MAX).any()


@pytest.mark.parametrize("fmt", ["fp8-e4m3", "fp8-e5m2", "int4"])
def test_fp32_scale_puts_amax_on_the_largest_code(fmt) -> None:
    """Two roundings of the scale and two of the products leave 2^-22 at most."""
    element = get_format(fmt).element
    amax = block_maxima(element.max)
    amax = amax[amax >= F32(element.max) * F32(2.0**-125)]  # the quotient does not saturate
    q = quantize(fp32(amax)[:, None], fmt)
    codes = element.decode(unpack(q.codes, element.bits))[:, 0]
    assert (codes == element.max).all()
    values = q.dequantize()[:, 0].double().numpy()
    assert np.abs(values / amax - 1).max() <= 2.0**-22


# --- the order of the operations -----------------------------------------------------------------


def near_tie_blocks(largest: float) -> np.ndarray:
    """[b 16] blocks whose scale lies within a few fp32 steps of a tie between two E4M3 values.

    Below their maximum they hold codes of 4 under 6, which Four Over Six leaves on 6.
    """
    amax = F32(1.7)
    ties = np.array(formats.midpoints(formats.E4M3_GRID), np.float32)
    ties = ties[(ties > 0.1) & (ties < largest)]
    near = ties * F32(6) / (F32(6 * largest) / amax)
    shape = np.array([1] + [2 / 3] * 15, np.float32)
    blocks = []
    for step in range(-3, 4):
        tops = (near.view(np.int32) + step).view(np.float32)
        blocks.append(tops[:, None] * shape)
    return np.concatenate([*blocks, amax * shape[None]])


def scales_two_ways(x: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 block scales from amax * (S * (1/6)), and from (amax / 6) * S."""
    amax = np.abs(x).max(axis=1)
    s_enc = F32(6 * largest) / amax.max()
    once, twice = amax * (s_enc * (F32(1) / F32(6))), (amax / F32(6)) * s_enc
    return tuple(v.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for v in (once, twice))


@pytest.mark.parametrize(("rule", "largest"), [("absmax", 448.0), ("four-over-six", 256.0)])
def test_each_rule_has_its_own_order_of_the_scale_products(rule, largest) -> None:
    """amax * (S * (1/6)) for absmax, (amax / 6) * S for Four Over Six, as TransformerEngine does.

    The second rounds once more. They give other E4M3 scales only beside a tie.
    """
    x = near_tie_blocks(largest)
    once, twice = scales_two_ways(x, largest)
    q = quantize(torch.from_numpy(x), scale_rule=rule)
    assert (codes_of(q).max(-1) == 6).all()
    assert (once != twice).any(), "inputs do not tell"
    assert_same_array(q.scale.float().numpy()[:, 0], once if rule == "absmax" else twice)


def nvfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(E2M1 codes, block scales) of [b 16] in two levels, by the equations and ml_dtypes' casts."""
    amax = np.abs(x).max(axis=1, keepdims=True)
    s_enc = F32(6 * 448) / amax.max()
    wanted = np.minimum(amax * (s_enc * (F32(1) / F32(6))), F32(448))
    scale = wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    decode = scale * (F32(1) / s_enc)
    y = x * (F32(1) / decode)  # as in TransformerEngine; ModelOpt divides, and moves some ties
    return np.clip(y, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32), scale


def codes_of(q: QuantizedTensor) -> np.ndarray:
    return q.fmt.element.decode(unpack(q.codes, 4)).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
def test_codes_are_the_equations_with_the_casts_of_ml_dtypes(dtype) -> None:
    x = torch.randn(4096, 16, generator=seeded(8)).to(dtype).float()
    q, (codes, scale) = quantize(x), nvfp4(x.numpy())
    assert_same_array(codes_of(q), codes)
    assert_same_array(q.scale.float().numpy(), scale)
