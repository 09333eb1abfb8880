"""fake_quantize in every format on what hypothesis draws: the reference and symmetries."""

from __future__ import annotations

import itertools

import pytest
import reference as ref
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from metis_hf.numerics import fake_quantize
from numerics.cases import (
    FLT_MAX,
    FORMAT_NAMES,
    MIXED_FORMATS,
    MX_FORMATS,
    OPTIONS,
    ROW_OPTIONS,
    Options,
    assert_same_bits,
)
from numerics.helpers import DTYPES, SCALE_ROUNDINGS, expected, seeded, to_numpy
from numerics.strategies import any_finite, matrices

# Derandomized: the same examples each run. Enough for each of the options to come up.
bounded = settings(max_examples=100, derandomize=True)

any_options = st.sampled_from(OPTIONS)
roundings = st.sampled_from(["nearest", "stochastic"])
seeds = st.integers(0, 99)
BY_DEFAULT = [{"fmt": fmt} for fmt in [*FORMAT_NAMES, *MIXED_FORMATS]]


# --- the reference -------------------------------------------------------------------------------
#
# It quantizes block by block, with loops: that blocks know nothing of each other's place, of
# strides and of padding is how it is written.


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    st.one_of(matrices(max_rows=20), any_finite()),
    st.sampled_from(OPTIONS + BY_DEFAULT),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_nearest_rounding_equals_the_reference(x, options, dim, transposed) -> None:
    if transposed:
        x = x.t()
    row = options.get("tile", "row") == "row"
    options = {**options, "dim": dim} if row else options
    assert_same_bits(fake_quantize(x, **options), expected(x, **options))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.one_of(matrices(), any_finite()),
    st.sampled_from([*OPTIONS, {"dim": 0}]),
    st.sampled_from(DTYPES),
    seeds,
)
def test_stochastic_rounding_gives_one_of_the_references_neighbours(
    x, options, dtype, seed
) -> None:
    """So values on the grid stay; stronger than "on the grid" and than "within one step"."""
    largest = torch.finfo(dtype).max
    x = x.double().clamp(-largest, largest).to(dtype)
    q = fake_quantize(x, rounding="stochastic", generator=seeded(seed), **options)
    wanted = ref.stochastic(to_numpy(x), **options)
    toward, away = (torch.from_numpy(t).to(dtype) for t in (wanted.toward, wanted.away))
    assert q.dtype is dtype
    assert ((q == toward) | (q == away)).all()


# --- scale and sign ------------------------------------------------------------------------------

# Exact as long as no scale, encode scale or result leaves the normal numbers of fp32 (and E8M0's
# 2^-127), and no element loses bits. matrices() lie within 2^-27 and 2^15; the widest formats use
# 2^31 below amax (E5M2: 2^-16 to 2^15).
SAFE_EXPONENTS = st.integers(-75, 75)
ONE_LEVEL = [options for options in OPTIONS if options.get("two_level") is False]
OTHERS = [options for options in OPTIONS if options not in ONE_LEVEL]


def assert_commutes(x: Tensor, factor: float, *, seed: int, **options) -> None:
    """Whether x or what it becomes is multiplied; the sign of a zero counts for nothing."""
    first, second = (fake_quantize(t, generator=seeded(seed), **options) for t in (x * factor, x))
    assert torch.equal(first, second * factor)


@bounded
@given(matrices(), SAFE_EXPONENTS, st.sampled_from(OTHERS), roundings, seeds)
def test_powers_of_two_commute(x, exponent, options, rounding, seed) -> None:
    assert_commutes(x, 2.0**exponent, rounding=rounding, seed=seed, **options)


@bounded
@given(matrices(), st.integers(-3, 7), st.sampled_from(ONE_LEVEL), roundings, seeds)
def test_powers_of_two_commute_with_one_level_in_the_normal_range(
    x, exponent, options, rounding, seed
) -> None:
    """E4M3 scales are exact in their own binades only: block scales within 2^-6 and 448."""
    x = x / x.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-40)
    x[:, ::16] = 1.0  # every block has an amax of 1, and a scale of 1/7 to 1/4
    assert_commutes(x, 2.0**exponent, rounding=rounding, seed=seed, **options)


@bounded
@given(st.one_of(matrices(), any_finite()), any_options, roundings, seeds)
def test_negation_commutes(x, options, rounding, seed) -> None:
    assert_commutes(x, -1.0, rounding=rounding, seed=seed, **options)


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
