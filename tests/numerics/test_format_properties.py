"""Properties of fake_quantize in every format, searched with hypothesis; no expected values needed.

Each holds for all formats, scales and tiles, or the condition under which it does is named and the
counterexample beyond it is shown.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference as ref
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from metis_hf.numerics import fake_quantize
from numerics import theory
from numerics.cases import FLT_MAX, MIXED_FORMATS, MX_FORMATS, OPTIONS, ROW_OPTIONS, Options
from numerics.helpers import SCALE_ROUNDINGS, assert_bitwise, seeded
from numerics.strategies import any_finite, matrices

# Derandomized: the same examples each run. Enough for each of the options to come up.
bounded = settings(max_examples=100, derandomize=True)

FEW_ULPS = 2.0**-21

any_options = st.sampled_from(OPTIONS)
row_options = st.sampled_from(ROW_OPTIONS)
roundings = st.sampled_from(["nearest", "stochastic"])
seeds = st.integers(0, 99)


def scale_of(options: Options) -> str:
    return theory.FORMATS[options["fmt"]].scale


def block_of(options: Options, columns: int) -> int:
    return theory.FORMATS[options["fmt"]].block or columns


# --- scale and sign ------------------------------------------------------------------------------

# Exact as long as no scale, encode scale or result leaves the normal numbers of fp32 (and E8M0's
# 2^-127), and no element loses bits. matrices() lie within 2^-27 and 2^15; the widest formats use
# 2^31 below amax (E5M2: 2^-16 to 2^15).
SAFE_EXPONENTS = st.integers(-75, 75)
ONE_LEVEL = [options for options in OPTIONS if options.get("two_level") is False]
OTHERS = [options for options in OPTIONS if options not in ONE_LEVEL]


@bounded
@given(matrices(), SAFE_EXPONENTS, st.sampled_from(OTHERS), roundings, seeds)
def test_powers_of_two_commute(x, exponent, options, rounding, seed) -> None:
    factor = 2.0**exponent
    first = fake_quantize(x * factor, rounding=rounding, generator=seeded(seed), **options)
    second = fake_quantize(x, rounding=rounding, generator=seeded(seed), **options)
    assert_bitwise(first, second * factor)


@bounded
@given(matrices(), st.integers(-3, 7), st.sampled_from(ONE_LEVEL), roundings, seeds)
def test_powers_of_two_commute_with_one_level_in_the_normal_range(
    x, exponent, options, rounding, seed
) -> None:
    """E4M3 scales are exact in their own binades only: block scales within 2^-6 and 448."""
    x = x / x.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-40)
    x[:, ::16] = 1.0  # every block has an amax of 1, and a scale of 1/7 to 1/4
    factor = 2.0**exponent
    first = fake_quantize(x * factor, rounding=rounding, generator=seeded(seed), **options)
    second = fake_quantize(x, rounding=rounding, generator=seeded(seed), **options)
    assert_bitwise(first, second * factor)


def test_powers_of_two_do_not_commute_below_the_smallest_scale() -> None:
    """2^-126 wants the MXFP4 scale 2^-128, gets 2^-127, and with it steps twice as large."""
    x = torch.tensor([1.0, 0.1])
    assert_bitwise(fake_quantize(x, "mxfp4"), torch.tensor([1.0, 0.125]))
    tiny = fake_quantize(x * 2.0**-126, "mxfp4")
    assert_bitwise(tiny, torch.tensor([1.0, 0.0]) * 2.0**-126)


@bounded
@given(st.one_of(matrices(), any_finite()), any_options, roundings, seeds)
def test_negation_commutes(x, options, rounding, seed) -> None:
    first = fake_quantize(-x, rounding=rounding, generator=seeded(seed), **options)
    second = fake_quantize(x, rounding=rounding, generator=seeded(seed), **options)
    assert_bitwise(first, -second)


# --- order, place, layout ------------------------------------------------------------------------


@bounded
@given(st.one_of(matrices(), any_finite()), row_options)
def test_order_inside_a_block_is_kept(x, options) -> None:
    ordered = x.flatten().sort().values
    q = fake_quantize(ordered, **options)
    for block in q.split(block_of(options, len(q))):
        assert (block[1:] >= block[:-1]).all()  # not of differences: inf - inf


@bounded
@given(matrices(), st.integers(0, 40), row_options, st.sampled_from([0, 1]))
def test_zero_padding_changes_nothing(x, extra, options, dim) -> None:
    shape = list(x.shape)
    shape[dim] = extra
    padded = fake_quantize(torch.cat([x, x.new_zeros(shape)], dim=dim), dim=dim, **options)
    length = x.shape[dim]
    assert_bitwise(padded.narrow(dim, 0, length), fake_quantize(x, dim=dim, **options))
    assert (padded.narrow(dim, length, extra) == 0).all()


@bounded
@given(matrices(max_rows=20), row_options)
def test_layout_changes_nothing(x, options) -> None:
    wanted = fake_quantize(x, **options)
    assert_bitwise(fake_quantize(x[:, None, :], **options)[:, 0], wanted)
    assert_bitwise(fake_quantize(x.t(), dim=0, **options).t(), wanted)
    assert_bitwise(fake_quantize(x.t().contiguous(), dim=0, **options).t(), wanted)
    strided = torch.stack([x, x + 1], dim=-1)[..., 0]
    assert_bitwise(fake_quantize(strided, **options), wanted)


@bounded
@given(matrices(max_rows=40), st.sampled_from([o for o in OPTIONS if o["tile"] == "square"]))
def test_square_tiles_are_the_same_both_ways(x, options) -> None:
    assert_bitwise(fake_quantize(x.t(), **options).t(), fake_quantize(x, **options))


@bounded
@given(matrices(), st.sampled_from([o for o in OPTIONS if o["tile"] == "tensor"]), st.randoms())
def test_one_scale_knows_no_shape_and_no_order(x, options, random) -> None:
    order = list(range(x.numel()))
    random.shuffle(order)
    wanted = fake_quantize(x, **options).flatten()[order]
    assert_bitwise(fake_quantize(x.flatten()[order], **options), wanted)


@bounded
@given(matrices(), st.randoms(use_true_random=False), row_options)
def test_blocks_are_independent_of_their_place(x, random, options) -> None:
    """Permuting blocks, or the elements of each block, permutes the result alike."""
    size = block_of(options, x.shape[1])
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    blocks = x.reshape(-1, size)
    order, inside = list(range(len(blocks))), list(range(size))
    random.shuffle(order)
    random.shuffle(inside)
    permuted = blocks[order][:, inside].reshape(x.shape)
    wanted = fake_quantize(x, **options).reshape(-1, size)[order][:, inside].reshape(x.shape)
    # Summing the 16 errors of Four Over Six in another order may break a near-tie the other way.
    if "scale_rule" in options:
        permuted = blocks[order].reshape(x.shape)
        wanted = fake_quantize(x, **options).reshape(-1, size)[order].reshape(x.shape)
    assert_bitwise(fake_quantize(permuted, **options), wanted)


@bounded
@given(matrices(), row_options)
def test_blocks_are_independent_of_each_other(x, options) -> None:
    """A block alone is what it is in company; under a tensor scale, in company of its amax."""
    whole = fake_quantize(x, **options)
    size = block_of(options, x.shape[1])
    for start in range(0, x.shape[1], size):
        part = x[-1:, start : start + size]
        if options.get("two_level"):
            part = torch.cat([part, torch.full_like(part, x.abs().amax())])
        assert_bitwise(fake_quantize(part, **options)[0], whole[-1, start : start + size])


# --- range ---------------------------------------------------------------------------------------


@bounded
@given(any_finite(), any_options, roundings, seeds)
@example(torch.full((2, 40), FLT_MAX), {"fmt": "mxfp4"}, "nearest", 0)
@example(torch.full((2, 40), 2.0**-149), {"fmt": "nvfp4"}, "stochastic", 0)
@example(torch.full((2, 40), 2.0**-149), {"fmt": "fp8-e5m2"}, "stochastic", 0)
def test_no_finite_input_gives_nan(x, options, rounding, seed) -> None:
    """And none gives inf as long as twice amax is finite."""
    q = fake_quantize(x, rounding=rounding, generator=seeded(seed), **options)
    assert not q.isnan().any()
    x = x / 2
    q = fake_quantize(x, rounding=rounding, generator=seeded(seed), **options)
    assert q.isfinite().all()


MIXED_OPTIONS = [
    {"fmt": fmt, "tile": "row", "scale_rounding": scale_rounding}
    for fmt, scale_rounding in itertools.product(MIXED_FORMATS, SCALE_ROUNDINGS)
]


def may_exceed_amax(options: Options, rounding: str) -> bool:
    """Whether a value may become a larger one than any that was there."""
    fmt, rule = options["fmt"], options.get("scale_rule")
    up, stochastic = options.get("scale_rounding") in ("up", "even"), rounding == "stochastic"
    of_rule = rule in ("unbiased", "search") or (rule == "four-over-six" and (up or stochastic))
    return of_rule or (up and (fmt in MX_FORMATS or (fmt == "mixfp4" and stochastic)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_infinity_only_where_the_grid_value_is_beyond_the_dtype(dtype) -> None:
    """Near the largest number of a dtype the next grid value may lie above it; it is not hidden.

    The grid value is found on a quarter of the tensor, in fp32, where nothing overflows.
    """
    x = torch.linspace(0.5, 1, 64 * 256, dtype=torch.float64).reshape(64, 256)
    x = (x * torch.finfo(dtype).max).to(dtype)
    assert x.isfinite().all()
    # Halfway to the next number that the dtype would have, a cast gives infinity.
    limit = torch.finfo(dtype).max * (1 + torch.finfo(dtype).eps / 4)
    every = itertools.product(ROW_OPTIONS + MIXED_OPTIONS, ("nearest", "stochastic"))
    for options, rounding in every:
        q, grid = (
            fake_quantize(part, rounding=rounding, generator=seeded(0), **options)
            for part in (x, x.float() / 4)
        )
        assert torch.equal(q.isinf(), (grid * 4.0).double().abs() >= limit)
        assert not q.isnan().any()
        assert q.isfinite().all() or may_exceed_amax(options, rounding)


# --- error ---------------------------------------------------------------------------------------

FP32_NOISE = 1 + 2.0**-20  # of three products and a quotient


@bounded
@given(st.one_of(matrices(), any_finite()), any_options, roundings, seeds)
def test_error_is_within_the_local_spacing(x, options, rounding, seed) -> None:
    """Half the gap between the neighbours of an element, times the scale; stochastic: all of it.

    What lies beyond the largest value becomes it. Scales are the reference's.
    """
    x = x / 2  # keeps scale * largest finite
    quantized = ref.fake_quantize(x.numpy(), **options)
    scale = quantized.scales.astype(np.float64) * quantized.inv_global
    q = fake_quantize(x, rounding=rounding, generator=seeded(seed), **options).double().numpy()
    exact = x.double().numpy()
    grid = theory.FORMATS[options["fmt"]].grid
    lost = scale == 0
    assert (q[lost] == 0).all()
    y = np.abs(exact) / np.where(lost, 1, scale)
    # A scale so small that its inverse is not a number of fp32 saves less than the spacing says.
    kept = ~lost & (scale >= 2.0**-126)
    inside = kept & (y <= grid[-1])
    above = np.clip(np.searchsorted(grid, y, side="right"), 1, len(grid) - 1)
    gap = grid[above] - grid[above - 1]
    allowed = gap / 2 if rounding == "nearest" else gap
    noise = (FP32_NOISE - 1) * y + (2.0**-149 / np.where(lost, 1, scale))
    error = np.abs(q - exact) / np.where(lost, 1, scale)
    assert (error <= allowed + noise)[inside].all()
    beyond = kept & (y > grid[-1] * FP32_NOISE)
    np.testing.assert_allclose(np.abs(q[beyond]), grid[-1] * scale[beyond], rtol=2.0**-20)


# --- idempotence ---------------------------------------------------------------------------------
#
# With nearest rounding, quantizing a second time changes nothing, for
# - E8M0 scales: always. "floor": the largest code is at least the top power of two, so amax stays
#   in its binade although it may clip. "up": where amax just passed the largest code it lands on
#   half of it, the second pass takes half the scale, and all codes double, which stays on the grid.
# - fp32 scales: exactly where largest / amax is a power of two; else 7 * (1 / (7 / amax)) may miss
#   amax by an ulp. Codes stay, values move by ulps.
# - E4M3 scales to nearest: where the largest code of each block is the format's largest, so from
#   SMALLEST_SAFE_SCALES up. With two levels S has to be a power of two, or values move by ulps.
# - E4M3 scales up: NVFP4 with one level, from a smallest safe scale. Otherwise not: a wanted scale
#   an ulp above an E4M3 number takes the next one, 1/8 higher (two levels: S moves by an ulp), and
#   a scale up to 1/8 too large leaves the largest element of an INT4 block at 6 instead of 7.
# - Four Over Six: as NVFP4; the block's choice reproduces itself with no error at all.


@bounded
@given(
    st.one_of(matrices(), any_finite()),
    st.sampled_from([o for o in OPTIONS if scale_of(o) == "e8m0"]),
)
def test_idempotent_with_powers_of_two_as_scales(x, options) -> None:
    once = fake_quantize(x / 2, **options)  # "up" may exceed fp32 otherwise
    assert_bitwise(fake_quantize(once, **options), once)


FP32_SCALED = [options for options in OPTIONS if scale_of(options) == "fp32"]


@bounded
@given(matrices(), st.sampled_from(FP32_SCALED))
def test_idempotent_up_to_ulps_with_fp32_scales(x, options) -> None:
    once = fake_quantize(x, **options)
    torch.testing.assert_close(fake_quantize(once, **options), once, rtol=FEW_ULPS, atol=0)


@bounded
@given(matrices(), st.integers(-30, 30), st.sampled_from(FP32_SCALED))
def test_idempotent_with_fp32_scales_that_are_powers_of_two(x, exponent, options) -> None:
    largest = theory.FORMATS[options["fmt"]].largest
    amax = largest * 2.0**exponent
    x = x / x.abs().amax().clamp(min=2.0**-40) * amax * 0.9
    x[:, ::16], x[::16, :] = amax, amax  # in each row, block and tile
    x[:, 0] = amax
    once = fake_quantize(x, **options)
    assert_bitwise(fake_quantize(once, **options), once)


def test_fp32_scales_are_not_idempotent_to_the_bit() -> None:
    x = torch.tensor([1.375])
    for fmt in ("int4", "fp8-e4m3", "fp8-e5m2"):
        assert fake_quantize(x, fmt) == torch.nextafter(x, torch.tensor(2.0))


# From here on, whatever a scale was rounded from, the largest element lies above the last tie of
# the grid: 5 of 6 (E2M1), 6.5 of 7 (INT4).
SMALLEST_SAFE_SCALES = {
    ("nvfp4", "nearest"): 3 * 2.0**-9,
    ("nvfp4", "up"): 6 * 2.0**-9,
    ("nvint4", "nearest"): 8 * 2.0**-9,
}
# A search may clip the tensor's largest element, and the tensor's scale changes with it. With room
# for the scale's rounding the largest element may become a larger one.
STABLE = [
    options
    for options in OPTIONS
    if (options["fmt"], options.get("scale_rounding")) in SMALLEST_SAFE_SCALES
    and not (options["scale_rounding"] == "up" and options["two_level"])
    and options.get("scale_rule") not in ("search", "unbiased")
]


def without_unsafe_blocks(x: Tensor, options: Options) -> Tensor:
    """x with the blocks of too small a scale set to zero (never the one that holds amax)."""
    scales = torch.from_numpy(ref.fake_quantize(x.numpy(), **options).scales)
    smallest = SMALLEST_SAFE_SCALES[options["fmt"], options["scale_rounding"]]
    return torch.where(scales < smallest, torch.zeros_like(x), x)


@bounded
@given(matrices(), st.integers(-30, 30), st.sampled_from(STABLE))
def test_idempotent_with_safe_e4m3_scales(x, exponent, options) -> None:
    if options["two_level"]:  # a tensor's amax that makes S a power of two
        top = theory.FORMATS[options["fmt"]].largest * (256 if "scale_rule" in options else 448)
        x = x / x.abs().amax().clamp(min=2.0**-40) * top * 0.7
        x[0, 0] = top
        x = without_unsafe_blocks(x, options) * 2.0**exponent
    else:
        x = without_unsafe_blocks(x, options)
    once = fake_quantize(x, **options)
    assert_bitwise(fake_quantize(once, **options), once)


@bounded
@given(matrices(), st.sampled_from([o for o in STABLE if o["two_level"]]))
def test_idempotent_up_to_ulps_with_safe_e4m3_scales(x, options) -> None:
    x = without_unsafe_blocks(x, options)
    once = fake_quantize(x, **options)
    torch.testing.assert_close(fake_quantize(once, **options), once, rtol=FEW_ULPS, atol=0)


def test_two_level_scales_up_are_not_idempotent() -> None:
    """amax = 1, S = 2688. A block of 0.375 wants the scale 168, takes 176, and holds 176 / 448.

    1 / 2688 is not exact: the second pass wants 176 and an ulp, takes 192, and grows by 9 %.
    """
    x = torch.tensor([[1.0], [0.375]]).expand(2, 16)
    once = fake_quantize(x, "nvfp4", scale_rounding="up")
    twice = fake_quantize(once, "nvfp4", scale_rounding="up")
    torch.testing.assert_close(once[1], torch.full((16,), 176 / 448), rtol=FEW_ULPS, atol=0)
    torch.testing.assert_close(twice[1], torch.full((16,), 192 / 448), rtol=FEW_ULPS, atol=0)


def test_int4_scales_up_are_not_idempotent() -> None:
    """8.1 / 7 takes the scale 1.25, and 8.1 / 1.25 the code 6; 7.5 / 7 then takes 1.125."""
    x = torch.tensor([8.1, 2.4])
    options = {"fmt": "nvint4", "scale_rounding": "up", "two_level": False}
    once = fake_quantize(x, **options)
    assert_bitwise(once, torch.tensor([7.5, 2.5]))
    assert_bitwise(fake_quantize(once, **options), torch.tensor([7.875, 2.25]))


@pytest.mark.parametrize(
    ("wanted_scale", "first", "second"),
    [
        (0.55, 3.0, 0.0),  # rounds up to 1; 3.3 to 3; a second pass wants 0.5, ties to 0
        (1.6, 8.0, 6.0),  # rounds up to 2; 4.8 to 4; a second pass wants 8/6, takes 1, clips 8
    ],
)
def test_subnormal_scales_are_not_idempotent(wanted_scale, first, second) -> None:
    """In units of 2^-9, the smallest E4M3 value, with S_enc = 1."""
    unit = 2.0**-9
    x = torch.zeros(2, 16)
    x[0] = 2688.0
    x[1, 0] = wanted_scale * 6 * unit
    once = fake_quantize(x)
    assert once[1, 0] == first * unit
    assert fake_quantize(once)[1, 0] == second * unit
