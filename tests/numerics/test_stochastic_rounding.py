"""Stochastic rounding: on the grid, next to the input, unbiased, reproducible, and nobody's RNG."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference as ref
import torch

from metis_hf.numerics import fake_quantize
from numerics.helpers import (
    DTYPES,
    SCALE_ROUNDINGS,
    assert_bitwise,
    normal,
    seeded,
    to_numpy,
)

SIGMAS = 4.0  # seeds are fixed, so this is a bound on the chosen draws, not a flaky rate


def stochastic_cases() -> list[dict]:
    return [
        {"scale_rounding": scale_rounding, "two_level": two_level}
        for scale_rounding in SCALE_ROUNDINGS
        for two_level in (True, False)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", stochastic_cases(), ids=str)
def test_stochastic_gives_one_of_the_two_neighbours(dtype, options) -> None:
    """Stronger than "within one grid step" and than "on the grid", in each dtype."""
    x = normal(12, 40, seed=15, dtype=dtype)
    wanted = ref.stochastic(to_numpy(x), **options)
    toward = torch.from_numpy(wanted.toward).to(dtype)
    away = torch.from_numpy(wanted.away).to(dtype)
    for seed in range(5):
        actual = fake_quantize(x, rounding="stochastic", generator=seeded(seed), **options)
        assert actual.dtype == dtype
        assert ((actual == toward) | (actual == away)).all()


@pytest.mark.parametrize(
    "options", [{"dim": 0}, {"dim": 1}, {"tile": "square"}], ids=["dim0", "dim1", "square"]
)
def test_stochastic_layouts_give_one_of_the_two_neighbours(options) -> None:
    x = normal(19, 35, seed=16)
    wanted = ref.stochastic(to_numpy(x), **options)
    actual = fake_quantize(x, rounding="stochastic", generator=seeded(0), **options)
    low, high = torch.from_numpy(wanted.toward), torch.from_numpy(wanted.away)
    assert ((actual == low) | (actual == high)).all()
    assert (actual != fake_quantize(x, **options)).any()  # it did draw


@pytest.mark.parametrize("two_level", [True, False], ids=["two_level", "one_level"])
@pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_on_the_grid(dtype, rounding, scale_rounding, two_level) -> None:
    """Each result is an E2M1 value times its block's scale, rounded to the dtype just once."""
    x = normal(8, 32, seed=17, dtype=dtype)
    options = {"scale_rounding": scale_rounding, "two_level": two_level}
    quantized = ref.fake_quantize(to_numpy(x), **options)
    grid = [(np.float32(code) * quantized.scales) * quantized.inv_global for code in ref.E2M1_GRID]
    points = torch.from_numpy(np.stack(grid)).to(dtype)
    actual = fake_quantize(x, rounding=rounding, generator=seeded(18), **options)
    assert (actual.abs() == points).any(dim=0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stochastic_leaves_grid_points_alone(dtype) -> None:
    grid = torch.tensor([*ref.E2M1_GRID, *(-v for v in ref.E2M1_GRID)], dtype=dtype)
    # The last row makes S_enc 1; powers of two as scales have exact reciprocals.
    x = torch.stack([grid, grid * 256, torch.full_like(grid, 2688)])
    for seed in range(20):
        actual = fake_quantize(x, rounding="stochastic", generator=seeded(seed))
        assert_bitwise(actual[:2], x[:2])


DRAWS = 3000


@pytest.mark.parametrize("two_level", [True, False], ids=["two_level", "one_level"])
@pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
def test_stochastic_mean_and_variance(scale_rounding, two_level) -> None:
    """DRAWS copies of one small tensor: the moments are those of the two neighbours."""
    x = torch.randn(24, 16, generator=seeded(19))
    options = {"scale_rounding": scale_rounding, "two_level": two_level}
    wanted = ref.stochastic(to_numpy(x), **options)
    if scale_rounding == "up":  # nothing clips, so the mean is x itself, block maxima included
        np.testing.assert_allclose(wanted.mean, x.numpy(), rtol=1e-6)
    copies = x.expand(DRAWS, -1, -1).contiguous()
    draws = fake_quantize(copies, rounding="stochastic", generator=seeded(20), **options)
    error = draws.numpy().astype(np.float64) - wanted.mean
    bias = error.mean(axis=0)
    variance = wanted.variance / DRAWS
    random = wanted.variance > 0
    weight = x.numpy().astype(np.float64)
    is_top = np.abs(weight) == np.abs(weight).max(axis=1, keepdims=True)

    # No element on its own: 384 normal deviates exceed 4.5 sigma with probability 0.003.
    assert np.abs(bias[random] / np.sqrt(variance[random])).max() < 4.5
    assert np.abs(bias[~random]).max(initial=0.0) <= 1e-6 * np.abs(weight).max()
    # Nor all together, nor the gain sum(x q) / sum(x x), nor the block maxima.
    for pick in (np.ones_like(weight), weight, weight * is_top):
        assert abs(np.sum(pick * bias)) < SIGMAS * np.sqrt(np.sum(pick**2 * variance))
    # Spread: each element's variance, and that of the sum, which correlated noise would change.
    ratio = (error[:, random] ** 2).mean() / wanted.variance[random].mean()
    assert abs(ratio - 1) < SIGMAS * np.sqrt(2 / (DRAWS * random.sum()))
    ratio = (error.sum(axis=(1, 2)) ** 2).mean() / wanted.variance.sum()
    assert abs(ratio - 1) < SIGMAS * np.sqrt(2 / DRAWS)


def test_stochastic_with_scale_up_keeps_the_gain_of_block_maxima() -> None:
    """The nearest scale clips some maxima and so shrinks them on average; up does not."""
    x = torch.randn(1 << 15, 16, generator=seeded(21))
    top = x.abs().argmax(dim=-1, keepdim=True)
    gains = {}
    for scale_rounding in SCALE_ROUNDINGS:
        q = fake_quantize(
            x, rounding="stochastic", scale_rounding=scale_rounding, generator=seeded(22)
        )
        a, b = x.gather(-1, top).double(), q.gather(-1, top).double()
        gains[scale_rounding] = float((a * b).sum() / (a * a).sum())
    # In the top interval (4, 6) a step is a third of the maximum, so one draw's deviation is at
    # most a sixth of it; 2^15 maxima of near-equal size average that to under 0.001.
    assert abs(gains["up"] - 1) < SIGMAS * (1 / 6) / math.sqrt(1 << 15)
    assert gains["nearest"] < 0.995


def test_stochastic_is_reproducible_from_a_generator() -> None:
    x = normal(16, 64, seed=23)
    first = fake_quantize(x, rounding="stochastic", generator=seeded(1))
    again = fake_quantize(x, rounding="stochastic", generator=seeded(1))
    other = fake_quantize(x, rounding="stochastic", generator=seeded(2))
    assert_bitwise(first, again)
    assert (first != other).any()


def test_stochastic_advances_its_generator() -> None:
    x, generator = normal(16, 64, seed=24), seeded(3)
    first = fake_quantize(x, rounding="stochastic", generator=generator)
    second = fake_quantize(x, rounding="stochastic", generator=generator)
    assert (first != second).any()


def test_stochastic_without_a_generator_follows_the_global_seed() -> None:
    x = normal(16, 64, seed=25)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        first = fake_quantize(x, rounding="stochastic")
        torch.manual_seed(7)
        again = fake_quantize(x, rounding="stochastic")
    assert_bitwise(first, again)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_global_rng_is_not_consumed(rounding) -> None:
    """A BF16 control run must not change because a quantizer with its own generator exists."""
    before = torch.get_rng_state()
    fake_quantize(normal(8, 32, seed=26), rounding=rounding, generator=seeded(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_nearest_consumes_no_randomness() -> None:
    before = torch.get_rng_state()
    fake_quantize(normal(8, 32, seed=27))
    assert torch.equal(torch.get_rng_state(), before)
