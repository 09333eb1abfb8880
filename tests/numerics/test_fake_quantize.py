"""fake_quantize against the slow reference, bit for bit; its gradient and errors.

The reference itself is held to ml_dtypes' casts first, so that three implementations agree.
"""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import reference as ref
import torch
from design import cases
from torch import Tensor

from metis_hf.numerics import SCALE_FP32, Quantizer, fake_quantize
from numerics.cases import FORMAT_NAMES, MIXED_FORMATS, OPTIONS, assert_same_bits, label
from numerics.helpers import (
    DTYPES,
    SCALE_ROUNDINGS,
    assert_bitwise,
    assert_matches_reference,
    expected,
    normal,
    seeded,
    to_numpy,
)

# --- the reference's own casts -------------------------------------------------------------------


def probes(grid: list[float]) -> np.ndarray:
    """Every grid point, every tie, and the fp32 neighbours of both, with both signs."""
    points = np.array(grid + ref.midpoints(grid), np.float32)
    below = np.nextafter(points, np.float32(-np.inf))
    above = np.nextafter(points, np.float32(np.inf))
    near = np.concatenate([points, below, above])
    return np.concatenate([near, -near])


def test_reference_e4m3_grid_is_every_finite_code_of_ml_dtypes() -> None:
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert codes.tolist() == ref.E4M3_GRID
    assert ref.E4M3_MAX == 448.0


def test_reference_e2m1_grid_is_every_code_of_ml_dtypes() -> None:
    codes = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert codes.tolist() == ref.E2M1_GRID


def test_reference_e2m1_nearest_agrees_with_ml_dtypes() -> None:
    x = probes(ref.E2M1_GRID)
    wanted = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    actual = np.array([ref.e2m1_nearest(v) for v in x])
    np.testing.assert_array_equal(actual, wanted)


def test_reference_e4m3_nearest_agrees_with_ml_dtypes() -> None:
    x = probes(ref.E4M3_GRID)
    wanted = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    actual = np.array([ref.e4m3_nearest(v) for v in x])
    np.testing.assert_array_equal(actual, wanted)


def test_reference_casts_saturate() -> None:
    for big in (449.0, 464.0, 1e9, 3e38):
        assert ref.e4m3_nearest(big) == ref.e4m3_up(big) == 448
        assert ref.e2m1_nearest(big) == 6
        assert ref.e2m1_nearest(-big) == -6
    for bad in (math.nan, math.inf):
        assert np.isnan(ref.e4m3_nearest(bad))
        assert np.isnan(ref.e4m3_up(bad))


def test_reference_e4m3_up_is_the_next_point_at_or_above() -> None:
    for low, high in itertools.pairwise(ref.E4M3_GRID):
        assert ref.e4m3_up(high) == high
        assert ref.e4m3_up(np.nextafter(np.float32(low), np.float32(np.inf))) == high


# --- nearest: bit for bit ------------------------------------------------------------------------

SHAPES = [(1,), (5,), (16,), (17,), (3, 33), (2, 3, 40)]
LEVELS = {"two_level": [True, False]}
ROUNDINGS = {"rounding": ["nearest", "stochastic"]}
SCALES = {"scale_rounding": SCALE_ROUNDINGS}
TILES = {"tile": ["row", "square"]}
# test_formats compares every way to quantize with the same reference: here each factor is beside
# each level of the others, in turn.


@cases({"shape": SHAPES, **LEVELS}, rotated={"dtype": DTYPES, **SCALES})
def test_rows_equal_reference(shape, dtype, two_level, scale_rounding) -> None:
    x = normal(*shape, seed=len(shape), dtype=dtype)
    assert_matches_reference(x, two_level=two_level, scale_rounding=scale_rounding)


@cases({"dim": [0, 1, 2, -1, -2]}, rotated=SCALES)
def test_any_dim_equals_reference(dim, scale_rounding) -> None:
    x = normal(18, 5, 35, seed=3)
    assert_matches_reference(x, dim=dim, scale_rounding=scale_rounding)


@cases({"dtype": DTYPES}, rotated={"dim": [0, 1, -1]})
def test_dim_of_a_matrix_equals_reference(dim, dtype) -> None:
    assert_matches_reference(normal(19, 33, seed=4, dtype=dtype), dim=dim)


@cases(
    {"shape": [(1, 1), (16, 16), (5, 40), (33, 17), (2, 18, 20)], **LEVELS},
    rotated={"dtype": DTYPES, **SCALES},
)
def test_square_tiles_equal_reference(shape, dtype, two_level, scale_rounding) -> None:
    x = normal(*shape, seed=5, dtype=dtype)
    assert_matches_reference(x, tile="square", two_level=two_level, scale_rounding=scale_rounding)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("shape", [(0,), (0, 16), (3, 0)], ids=str)
def test_empty_in_empty_out(shape, rounding) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    actual = fake_quantize(x, rounding=rounding)
    assert actual.shape == x.shape
    assert actual.dtype == x.dtype


@pytest.mark.parametrize("tile", ["row", "square"])
def test_strides_do_not_matter(tile) -> None:
    base = normal(40, 36, seed=6)
    assert_matches_reference(base.t(), tile=tile)
    assert_matches_reference(base[::2, 1::3], tile=tile)
    assert_matches_reference(base[:1].expand(17, -1), tile=tile)
    assert_matches_reference(base[:, :1].expand(-1, 33), tile=tile)


@pytest.mark.parametrize("dim", [0, 1])
def test_strides_do_not_matter_along_dim(dim) -> None:
    base = normal(40, 36, seed=7)
    assert_matches_reference(base.t(), dim=dim)
    assert_matches_reference(base[:1].expand(17, -1), dim=dim)


@cases(
    {"size": [1e-5, 1e-20, 1e-36, 1e-40, 1e-45, 1e20, 1e30, 3e37], **LEVELS},
    rotated={**SCALES, **TILES},
)
def test_tiny_and_huge_values_equal_reference(size, two_level, scale_rounding, tile) -> None:
    x = torch.randn(4, 35, generator=seeded(8), dtype=torch.float64) * size
    x = x.clamp(-3e38, 3e38).to(torch.float32)
    assert_matches_reference(x, two_level=two_level, scale_rounding=scale_rounding, tile=tile)


@pytest.mark.parametrize("two_level", [True, False], ids=["two_level", "one_level"])
@pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
def test_wide_range_within_a_tensor_equals_reference(two_level, scale_rounding) -> None:
    """Rows from 2^-30 to 2^12: scales that are normal, subnormal and zero in one tensor."""
    rows = torch.exp2(torch.arange(-30, 13, dtype=torch.float32))[:, None]
    x = torch.randn(43, 32, generator=seeded(9)) * rows
    assert_matches_reference(x, two_level=two_level, scale_rounding=scale_rounding)


def test_scale_product_is_rounded_once() -> None:
    """amax * (S_enc / 6), not (amax / 6) * S_enc: the second form rounds some scales elsewhere.

    The block maxima sit within a few fp32 steps of ties between two E4M3 scales.
    """
    ties = np.array(ref.midpoints(ref.E4M3_GRID)[40:], np.float32)
    amax = np.float32(1.7)
    s_enc = np.float32(2688) / amax
    near = ties * np.float32(6) / s_enc
    blocks = []
    for step in range(-3, 4):
        shifted = (near.view(np.int32) + step).view(np.float32)
        blocks.append(shifted[:, None] * np.linspace(0, 1, 16, dtype=np.float32))
    x = torch.from_numpy(np.concatenate([*blocks, np.full((1, 16), amax)]))
    other = (to_numpy(x).max(axis=1) / np.float32(6)) * s_enc
    scales = ref.fake_quantize(to_numpy(x)).scales[:, 0]
    assert any(ref.e4m3_nearest(v) != s for v, s in zip(other, scales)), "inputs do not tell"
    assert_matches_reference(x)


def tie_blocks() -> Tensor:
    """[b 16] with block scale 1 and global scale 1: what is written is what gets rounded."""
    x = probes(ref.E2M1_GRID)
    x = x[np.abs(x) < 6]
    x = np.concatenate([x, np.zeros(-len(x) % 15, np.float32)]).reshape(-1, 15)
    blocks = np.concatenate([np.full((len(x), 1), 6, np.float32), x], axis=1)
    return torch.from_numpy(blocks)


TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


@pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("two_level", [True, False], ids=["two_level", "one_level"])
def test_ties_and_their_neighbours(two_level, scale_rounding) -> None:
    x = tie_blocks()
    if two_level:  # a row of 2688 = 448 * 6 makes S_enc exactly 1
        x = torch.cat([x, torch.full((1, 16), 2688.0)])
    scales = ref.fake_quantize(to_numpy(x), two_level=two_level).scales
    assert (scales[x.abs().amax(dim=-1) == 6] == 1).all()
    assert_matches_reference(x, two_level=two_level, scale_rounding=scale_rounding)
    actual = fake_quantize(x, two_level=two_level, scale_rounding=scale_rounding)
    for tie, wanted in TIES.items():  # stated without the reference as well
        assert (x == tie).any()
        assert (actual[x == tie] == wanted).all()
        assert (actual[x == -tie] == -wanted).all()


@cases({**LEVELS, **ROUNDINGS}, rotated={**TILES, **SCALES, "dtype": DTYPES})
def test_all_zero_tensor_is_zero(tile, rounding, two_level, scale_rounding, dtype) -> None:
    x = torch.zeros(3, 20, dtype=dtype)
    x[1] = -0.0
    actual = fake_quantize(
        x, tile=tile, rounding=rounding, two_level=two_level, scale_rounding=scale_rounding
    )
    assert_bitwise(actual, torch.zeros_like(x))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
def test_zero_block_beside_others_is_zero(rounding, scale_rounding) -> None:
    x = normal(4, 48, seed=10)
    x[:, 16:32] = 0
    x[0, 16] = -0.0
    actual = fake_quantize(x, rounding=rounding, scale_rounding=scale_rounding)
    assert (actual[:, 16:32] == 0).all()
    assert (actual[:, :16] != 0).any()
    if rounding == "nearest":
        assert_bitwise(actual, expected(x, scale_rounding=scale_rounding))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_block_whose_scale_underflows_is_zero(rounding) -> None:
    """Nearest scale: amax_block * 448 / amax under 2^-10 has no E4M3 value; nothing is clamped."""
    x = torch.ones(2, 16)
    x[1] = 2.0**-19
    actual = fake_quantize(x, rounding=rounding)
    assert (actual[1] == 0).all()
    assert (actual[0] == 1).all()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_scale_up_with_two_levels_never_clips(size) -> None:
    """A block's largest element is never made smaller: it lands on 6, which is at or above it."""
    x = torch.randn(512, 16, generator=seeded(11)) * size
    top = x.abs().amax(dim=-1)
    fp32_noise = 2.0**-20  # three fp32 products and a quotient
    up = fake_quantize(x, scale_rounding="up").abs().amax(dim=-1)
    assert (up >= top * (1 - fp32_noise)).all()
    nearest = fake_quantize(x, scale_rounding="nearest").abs().amax(dim=-1)
    assert (nearest < top * (1 - fp32_noise)).any()  # the property is not vacuous


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_zeros_stay_zero_where_subnormal_numbers_are_flushed(options) -> None:
    """The scale of a block of zeros may be subnormal."""
    x = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    x[:32] = 0
    wanted = fake_quantize(x, **options)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes none")
    try:
        flushed = fake_quantize(x, **options)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(flushed, wanted)


# --- what must not be hidden ---------------------------------------------------------------------

BAD_VALUES = [math.nan, math.inf, -math.inf]


@cases({"bad": BAD_VALUES, **ROUNDINGS}, rotated={**SCALES, "dtype": DTYPES})
def test_nan_and_inf_reach_the_whole_tensor_with_two_levels(
    bad, rounding, scale_rounding, dtype
) -> None:
    x = normal(3, 40, seed=12, dtype=dtype)
    x[1, 17] = bad
    actual = fake_quantize(x, rounding=rounding, scale_rounding=scale_rounding)
    assert actual.isnan().all()


@cases({"bad": BAD_VALUES}, rotated={**ROUNDINGS, **SCALES})
def test_nan_and_inf_reach_their_block_with_one_level(bad, rounding, scale_rounding) -> None:
    x = normal(3, 40, seed=13)
    x[1, 17] = bad
    actual = fake_quantize(x, rounding=rounding, scale_rounding=scale_rounding, two_level=False)
    assert not actual[1, 16:32].isfinite().any()


@pytest.mark.parametrize("bad", BAD_VALUES)
@pytest.mark.parametrize("two_level", [True, False], ids=["two_level", "one_level"])
def test_nan_and_inf_reach_their_tile(bad, two_level) -> None:
    x = normal(20, 40, seed=14)
    x[3, 17] = bad
    actual = fake_quantize(x, tile="square", two_level=two_level)
    assert not actual[:16, 16:32].isfinite().any()


def test_fp64_beyond_fp32_is_not_hidden() -> None:
    x = torch.ones(16, dtype=torch.float64)
    x[3] = 1e300
    assert not fake_quantize(x).isfinite().any()


@pytest.mark.parametrize("fmt", FORMAT_NAMES + MIXED_FORMATS)
def test_bf16_holds_values_without_outer_scale(fmt) -> None:
    """Exactly, but under fp32 block scales and in integers with a step of 6/7."""
    quantizer, x = Quantizer(fmt), normal(64, 64)
    values, _ = quantizer.unscaled(x)
    in_bf16, _ = quantizer.unscaled(x, dtype=torch.bfloat16)
    rounds = quantizer.fmt.scale == SCALE_FP32 or fmt == "if4"
    assert torch.equal(in_bf16.float(), values) is not rounds


# --- gradient, metadata, errors ------------------------------------------------------------------


@cases({"dtype": DTYPES}, rotated={**ROUNDINGS, **TILES})
def test_gradient_is_straight_through(dtype, rounding, tile) -> None:
    x = normal(5, 33, seed=32, dtype=dtype).requires_grad_()
    upstream = normal(5, 33, seed=33, dtype=dtype)
    fake_quantize(x, rounding=rounding, tile=tile, generator=seeded(5)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    x.grad = None
    fake_quantize(x, rounding=rounding, tile=tile, generator=seeded(5)).backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_gradient_passes_through_clipped_and_zero_blocks() -> None:
    x = torch.full((2, 16), 1e6)
    x[1] = 0
    x.requires_grad_()
    fake_quantize(x, two_level=False).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_without_grad_there_is_no_graph() -> None:
    assert not fake_quantize(normal(2, 16)).requires_grad
    x = normal(2, 16).requires_grad_()
    with torch.no_grad():
        assert not fake_quantize(x).requires_grad
