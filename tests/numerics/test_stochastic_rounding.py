"""Stochastic rounding: on the grid, next to the input, unbiased, reproducible, and nobody's RNG."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference as ref
import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics import FORMATS, fake_quantize
from metis_hf.numerics.rounding import round_stochastic
from numerics import theory
from numerics.cases import FORMAT_NAMES, assert_same_bits, label
from numerics.helpers import normal, seeded, to_numpy
from numerics.theory import NOTHING_CLIPS

SIGMAS = 4.0  # seeds are fixed, so this is a bound on the chosen draws, not a flaky rate
CLIPPING = [
    {"fmt": name, "scale_rounding": "floor" if fmt.scale == "e8m0" else "nearest"}
    for name, fmt in theory.FORMATS.items()
    if fmt.scale != "fp32"
]


# --- one element, noise given --------------------------------------------------------------------

NOISE_STEPS = 1 << 24  # noise is a multiple of 2^-24
GRIDS = {
    FORMATS[name].element.name: (FORMATS[name].element, fmt.grid)
    for name, fmt in theory.FORMATS.items()
}
each_grid = pytest.mark.parametrize("name", GRIDS)


def rounded(name: str, y: np.ndarray, noise_step: np.ndarray | int) -> np.ndarray:
    """Stochastic rounding of y with noise `noise_step` * 2^-24."""
    u = np.broadcast_to(np.asarray(noise_step) / NOISE_STEPS, y.shape).astype(np.float32)
    y = torch.from_numpy(np.ascontiguousarray(y, np.float32))
    return round_stochastic(y, GRIDS[name][0], torch.from_numpy(u)).numpy()


def interval_points(grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y, low, high) in fp32, float64, float64: points strictly inside each interval of the grid.

    As close to both ends as fp32 allows, and in the middle.
    """
    low, high = (a[:, None] for a in (grid[:-1], grid[1:]))
    near = np.array([2.0**-40, 2.0**-25, 2.0**-24, 1.5 * 2.0**-24, 2.0**-16, 0.01])
    inside = np.concatenate([near, [1 / 3, 0.5, 0.7], 1 - near])
    y = (low + inside * (high - low)).astype(np.float32)
    y = np.clip(y, np.nextafter(low.astype(np.float32), np.float32(np.inf)), None)
    y = np.clip(y, None, np.nextafter(high.astype(np.float32), np.float32(0)))
    return y, np.broadcast_to(low, y.shape), np.broadcast_to(high, y.shape)


@each_grid
def test_grid_points_never_move(name) -> None:
    grid = GRIDS[name][1]
    for y in (grid, -grid):
        for step in (0, 1, NOISE_STEPS // 2, NOISE_STEPS - 1):
            np.testing.assert_array_equal(rounded(name, y, step), y)


@each_grid
def test_probability_is_the_fraction_in_each_interval(name) -> None:
    """Up for exactly the ceil(fraction * 2^24) smallest noise values, to the last one.

    In the interval around zero fractions may be finer than the noise; they round up too often, by
    less than 2^-24. Fractions of larger values have few bits, and their probability is exact.
    """
    y, low, high = interval_points(GRIDS[name][1])
    count = np.ceil((y.astype(np.float64) - low) / (high - low) * NOISE_STEPS)
    assert (count >= 1).all()
    for sign in (1, -1):
        for step in (0, count - 2, count - 1):
            up = rounded(name, sign * y, np.maximum(step, 0))
            np.testing.assert_array_equal(up, sign * high)
        for step in (count, count + 1, NOISE_STEPS - 1):
            down = rounded(name, sign * y, np.minimum(step, NOISE_STEPS - 1))
            np.testing.assert_array_equal(down, sign * np.where(count < NOISE_STEPS, low, high))


@each_grid
def test_each_interval_is_unbiased_with_the_noise_of_a_key(name) -> None:
    """Intervals have their own step and fraction: errors of one would hide in a sum over all."""
    grid = GRIDS[name][1]
    grid = np.concatenate([-grid[:0:-1], grid])
    draws = (1 << 22) // len(grid)
    low, high = grid[:-1, None], grid[1:, None]
    y = (low + (np.arange(draws) + 0.5) / draws * (high - low)).astype(np.float32)
    u = noise.uniform(y.shape, noise.key_of("intervals", name))
    q = round_stochastic(torch.from_numpy(y), GRIDS[name][0], u).numpy().astype(np.float64)
    assert ((q == low) | (q == high)).all()
    variance = (y - low) * (high - y.astype(np.float64))
    z = (q - y).sum(axis=1) / np.sqrt(variance.sum(axis=1))
    assert np.abs(z).max() < SIGMAS
    outward = np.sign(low + high)[:, 0]  # both directions: up, and away from zero
    assert abs(z.sum()) < SIGMAS * math.sqrt(len(z))
    assert abs(z @ outward) < SIGMAS * math.sqrt(len(z))
    spread = ((q - y) ** 2).sum(axis=1) / variance.sum(axis=1)
    # Var((q - y)^2) is at most var(q - y) * h^2 / 4, and var(q - y) is h^2 / 6 on average.
    assert np.abs(spread - 1).max() < SIGMAS * math.sqrt(1.5 / draws)


# --- tensors -------------------------------------------------------------------------------------


DRAWS = 3000
MOMENT_CASES = [
    *NOTHING_CLIPS,
    *CLIPPING,
    {"fmt": "nvfp4", "scale_rounding": "up", "two_level": False},
    {"fmt": "nvfp4", "scale_rounding": "nearest", "two_level": False},
]


@pytest.mark.parametrize("options", MOMENT_CASES, ids=label)
def test_stochastic_mean_and_variance(options) -> None:
    """DRAWS copies of one small tensor: the moments are those of the two neighbours."""
    x = torch.randn(24, 16, generator=seeded(19))
    wanted = ref.stochastic(to_numpy(x), **options)
    if options["scale_rounding"] == "up" or options in NOTHING_CLIPS:
        # The mean is x itself, block maxima included.
        np.testing.assert_allclose(wanted.mean, x.numpy(), rtol=1e-6)
    copies = x.expand(DRAWS, -1, -1).contiguous()
    draws = fake_quantize(copies, rounding="stochastic", generator=seeded(20), **options)
    error = draws.numpy().astype(np.float64) - wanted.mean
    bias = error.mean(axis=0)
    variance = wanted.variance / DRAWS
    random = wanted.variance > 0
    weight = x.numpy().astype(np.float64)
    is_top = np.abs(weight) == np.abs(weight).max(axis=1, keepdims=True)

    # No element on its own: all cases have 7000 deviates, which exceed 5 sigma with P = 0.004.
    assert np.abs(bias[random] / np.sqrt(variance[random])).max() < 5
    assert np.abs(bias[~random]).max(initial=0.0) <= 1e-6 * np.abs(weight).max()
    # Nor all together, nor the gain sum(x q) / sum(x x), nor the block maxima.
    for pick in (np.ones_like(weight), weight, weight * is_top):
        assert abs(np.sum(pick * bias)) < SIGMAS * np.sqrt(np.sum(pick**2 * variance))
    # Spread: each element's variance, and that of the sum, which correlated noise would change.
    ratio = (error[:, random] ** 2).mean() / wanted.variance[random].mean()
    assert abs(ratio - 1) < SIGMAS * np.sqrt(2 / (DRAWS * random.sum()))
    ratio = (error.sum(axis=(1, 2)) ** 2).mean() / wanted.variance.sum()
    assert abs(ratio - 1) < SIGMAS * np.sqrt(2 / DRAWS)


def test_stochastic_is_reproducible_from_a_generator() -> None:
    """And takes nothing from torch's: a control run must not notice that a quantizer exists."""
    x, before = normal(16, 64, seed=23), torch.get_rng_state()
    for fmt in FORMAT_NAMES:
        generator = seeded(1)
        first, other = (
            fake_quantize(x, fmt, rounding="stochastic", generator=generator) for _ in range(2)
        )
        again = fake_quantize(x, fmt, rounding="stochastic", generator=seeded(1))
        assert_same_bits(first, again)
        assert (first != other).any()
    assert torch.equal(torch.get_rng_state(), before)


# --- independence --------------------------------------------------------------------------------


def correlation_in_sigmas(first: Tensor, second: Tensor) -> float:
    """sum(a b) over its own spread: standard normal if a and b are independent, of mean zero."""
    product = first.double() * second.double()
    return float(product.sum() / product.square().sum().sqrt())


SAME_NOISE = 20.0  # sigmas at least, where two copies are rounded with the same noise


def matrix() -> Tensor:
    return torch.randn(256, 256, generator=seeded(28))


@pytest.mark.parametrize("options", NOTHING_CLIPS, ids=label)
def test_two_draws_of_one_generator_are_independent(options) -> None:
    """dgrad and wgrad see the same gradient, blocked along rows and along columns.

    Were their errors correlated, so would be those of dx and dw, and averaging over steps would
    not remove the common part. With the same noise they are: the test can tell.
    """
    x, draw = matrix(), {"rounding": "stochastic", **options}
    for dims in ((1, 1), (0, 1)):
        generator = seeded(29)
        first, second = (fake_quantize(x, dim=dim, generator=generator, **draw) - x for dim in dims)
        assert abs(correlation_in_sigmas(first, second)) < SIGMAS
        again = fake_quantize(x, dim=dims[1], generator=seeded(29), **draw) - x
        assert correlation_in_sigmas(first, again) > SAME_NOISE
