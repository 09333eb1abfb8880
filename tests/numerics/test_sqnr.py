"""Quality: measured SQNR, gain and clipping against the expectations that `theory` integrates.

Bit-for-bit tests say that the code computes its equations; these say that the equations have the
quality which the definitions of the formats promise. Nothing here is fitted.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from design import some_slow
from torch import Tensor

from metis_hf.numerics import Quantizer, fake_quantize, sqnr_db
from numerics import theory
from numerics.helpers import seeded
from numerics.theory import NORMAL, NOTHING_CLIPS, STUDENT3, UNIFORM, Elements, Expected

# SQNR in dB on N(0, 1), from theory to 0.01 dB; each is held to measurement here.
SQNR_NVFP4_NORMAL_NEAREST = 20.44
SQNR_NVFP4_NORMAL_UP = 19.97
SQNR_NVFP4_NORMAL_STOCHASTIC = 17.24
SQNR_NVFP4_NORMAL_SQUARE = 19.07
SQNR_MXFP4_NORMAL = 18.79
# Measured: blocks that choose their scale by its error.
SQNR_NVFP4_NORMAL_FOUR_OVER_SIX = 21.21
SQNR_NVFP4_NORMAL_SEARCH = 21.72
# The two digits of the numbers above, and one phase of amax between two E4M3 scales: 0.02 dB.
NUMBER_TOLERANCE = 0.03
# What measurement and theory may differ by, beside SIGMAS sampling errors. Theory is exact up to
# its quadrature (under 0.01 dB) where elements are independent. With the largest sampling error
# that is allowed below, a comparison of light-tailed elements is never wider than 0.3 dB.
THEORY_TOLERANCE = 0.02
# Rows of orthogonal factors have elements that are independent up to O(1 / columns), and share
# columns.
APPROXIMATE_TOLERANCE = 0.15
# One sampling error, which has to leave the comparison its meaning: most modes are 0.4 dB apart.
LIGHT_TAILED_SAMPLING_ERROR = 0.05
HEAVY_TAILED_SAMPLING_ERROR = 0.12  # also where a few columns or components hold the energy

SOURCES = ("normal", "uniform", "student3", "outliers", "power-0.5", "power-1")
SIGMAS = 4.0  # seeds are fixed, so this is a bound on the chosen draws, not a flaky rate
SIDE = 1024
OUTLIER_SIZE, OUTLIERS = 50.0, 10  # 1 % of the columns
SCALE_ROUNDINGS_OF = {"e4m3": ("nearest", "up"), "e8m0": ("floor", "up"), "fp32": ("nearest",)}


# --- sources: a seeded tensor, and the densities of its elements ---------------------------------


class Source(NamedTuple):
    x: Tensor  # [t SIDE]
    sizes: np.ndarray  # [r SIDE]: sizes of the elements of r typical rows, equally frequent
    density: theory.Density
    tolerance: float = THEORY_TOLERANCE
    sampling_error: float = LIGHT_TAILED_SAMPLING_ERROR


def power_law(exponent: float, seed: int) -> Source:
    """U diag(i^-exponent) V^T with U, V uniform on the orthogonal group.

    Row i is V c with c_k = u_ik k^-exponent. V is independent of U, so given U the row is uniform
    on the sphere of radius |c|: its elements are normal with variance |c|^2 / SIDE, up to O(1 /
    SIDE). The variance is the row's own, and differs between rows since few c_k matter. Rows are
    not independent, as they share V, which changes no expectation.
    """
    u, v = (
        torch.linalg.qr(torch.randn(SIDE, SIDE, generator=seeded(seed + i))).Q for i in range(2)
    )
    c = u * torch.arange(1, SIDE + 1) ** -exponent
    x = c @ v.T * math.sqrt(SIDE)
    sizes = c.square().sum(1).sort().values.reshape(32, -1).mean(1).sqrt().double().numpy()
    sizes = np.repeat(sizes[:, None], SIDE, axis=1)
    return Source(x, sizes, NORMAL, APPROXIMATE_TOLERANCE, HEAVY_TAILED_SAMPLING_ERROR)


@functools.cache
def source(name: str) -> Source:
    ones = np.ones((1, SIDE))
    if name == "normal":
        return Source(torch.randn(SIDE, SIDE, generator=seeded(28)), ones, NORMAL)
    if name == "uniform":
        return Source(torch.rand(SIDE, SIDE, generator=seeded(29)) * 2 - 1, ones, UNIFORM)
    if name == "student3":
        chi = torch.randn(SIDE, SIDE, 3, generator=seeded(30)).square().sum(-1)
        x = torch.randn(SIDE, SIDE, generator=seeded(31)) / (chi / 3).sqrt()
        return Source(x, ones, STUDENT3, sampling_error=HEAVY_TAILED_SAMPLING_ERROR)
    if name == "outliers":
        sizes = ones.copy()
        sizes[:, :: SIDE // OUTLIERS][:, :OUTLIERS] = OUTLIER_SIZE
        x = torch.randn(4 * SIDE, SIDE, generator=seeded(32)) * torch.from_numpy(sizes).float()
        return Source(x, sizes, NORMAL, sampling_error=HEAVY_TAILED_SAMPLING_ERROR)
    return power_law(float(name.removeprefix("power-")), seed=33)


def blocks_of(x: np.ndarray, fmt: str, tile: str) -> np.ndarray:
    """[blocks n]: the elements that share a scale; for one scale in all, rows."""
    block = theory.FORMATS[fmt].block
    if tile == "square":
        rows, columns = x.shape
        tiles = x.reshape(rows // block, block, columns // block, block)
        return tiles.swapaxes(1, 2).reshape(-1, block * block)
    return x.reshape(-1, block or SIDE)


def expectation(src: Source, fmt: str, tile: str = "row", **options) -> Expected:
    """Theory for all of a source: each kind of block once, times how often it occurs."""
    sizes = src.sizes
    if tile == "square" and len(sizes) == 1:
        sizes = np.repeat(sizes, theory.FORMATS[fmt].block, axis=0)
    kinds, counts = np.unique(blocks_of(sizes, fmt, tile), axis=0, return_counts=True)
    amax = float(src.x.abs().max())
    total = Expected(0, 0, 0, 0, 0)
    for kind, count in zip(kinds, counts):
        block = [
            Elements(src.density, s, int(n)) for s, n in zip(*np.unique(kind, return_counts=True))
        ]
        whole = tile == "tensor"
        total += int(count) * theory.expected(block, fmt, amax=amax, whole_tensor=whole, **options)
    return total


def sampling_error(pick: np.ndarray, total: np.ndarray) -> float:
    """Standard error of sum(pick) / sum(total) over independent blocks.

    A ratio's deviation is the mean of d = pick - ratio * total. Without a fourth moment the
    variance of d does not exist, but sum(d) / sqrt(sum(d^2)) keeps Gaussian tails all the same (it
    is self-normalized; Efron 1969): if one block makes the sum deviate, it makes the root as large.
    """
    d = pick - pick.sum() / total.sum() * total
    return float(np.sqrt(np.sum(d * d)) / total.sum())


class Measured(NamedTuple):
    sqnr_db: float
    sqnr_error: float
    gain: float
    gain_error: float


def measure(src: Source, fmt: str, tile: str = "row", **options) -> Measured:
    q = fake_quantize(src.x, fmt, tile=tile, generator=seeded(34), **options)
    x, q = src.x.double().numpy(), q.double().numpy()
    if len(src.sizes) > 1:  # rows share their columns: strips of columns are the independent parts
        parts = [a.reshape(SIDE, -1, 16).swapaxes(0, 1).reshape(-1, 16 * SIDE) for a in (x, q)]
    else:
        parts = [blocks_of(a, fmt, tile) for a in (x, q)]
    x, q = parts
    energy, error, product = (np.sum(a, axis=1) for a in (x * x, (x - q) ** 2, x * q))
    ratio = error.sum() / energy.sum()
    return Measured(
        -10 * math.log10(ratio),
        10 / math.log(10) * sampling_error(error, energy) / ratio,
        product.sum() / energy.sum(),
        sampling_error(product, energy),
    )


# --- SQNR ----------------------------------------------------------------------------------------


def cases() -> list[tuple[str, dict]]:
    """NVFP4 with everything; of the other formats each option on a normal tensor."""
    found = []
    for name, fmt in theory.FORMATS.items():
        other_tile = "tensor" if fmt.block is None else "square"
        found.append(("outliers", {"fmt": name, "tile": other_tile}))
        found.append(("normal", {"fmt": name, "rounding": "stochastic"}))
        for scale_rounding in SCALE_ROUNDINGS_OF[fmt.scale]:
            found.append(("normal", {"fmt": name, "scale_rounding": scale_rounding}))
    turns = [("row", "nearest", "nearest"), ("row", "stochastic", "up"),
             ("square", "stochastic", "nearest"), ("square", "nearest", "up")]  # fmt: skip
    for src, (tile, rounding, scale_rounding) in itertools.product(SOURCES[1:], turns):
        if tile == "row" or not src.startswith("power"):
            options = {"tile": tile, "rounding": rounding, "scale_rounding": scale_rounding}
            found.append((src, {"fmt": "nvfp4", **options}))
    found += [("normal", {"fmt": fmt, "two_level": False}) for fmt in ("nvfp4", "nvint4")]
    found += [("power-1", {"fmt": fmt}) for fmt in ("mxfp4", "fp8-e4m3")]
    return found


def case_id(value: object) -> str:
    return value if isinstance(value, str) else "-".join(str(v) for v in value.values())


# Four million elements, or theory of a thousand sizes: NVFP4 stands for the other formats.
LARGE = [(src, options) for src, options in cases()
         if src in ("outliers", "power-1") and options["fmt"] != "nvfp4"]  # fmt: skip


@pytest.mark.parametrize(("src", "options"), some_slow(cases(), LARGE), ids=case_id)
def test_sqnr_is_the_expected_one(src, options) -> None:
    data = source(src)
    wanted, actual = expectation(data, **options), measure(data, **options)
    assert actual.sqnr_error < data.sampling_error
    allowed = data.tolerance + SIGMAS * actual.sqnr_error
    assert actual.sqnr_db == pytest.approx(wanted.sqnr_db, abs=allowed)


# --- the numbers to remember ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, SQNR_NVFP4_NORMAL_NEAREST),
        ({"dim": 0}, SQNR_NVFP4_NORMAL_NEAREST),
        ({"scale_rounding": "up"}, SQNR_NVFP4_NORMAL_UP),
        ({"rounding": "stochastic"}, SQNR_NVFP4_NORMAL_STOCHASTIC),
        ({"tile": "square"}, SQNR_NVFP4_NORMAL_SQUARE),
        ({"scale_rule": "four-over-six"}, SQNR_NVFP4_NORMAL_FOUR_OVER_SIX),
        ({"scale_rule": "search"}, SQNR_NVFP4_NORMAL_SEARCH),
        ({"fmt": "mxfp4"}, SQNR_MXFP4_NORMAL),
    ],
    ids=str,
)
def test_sqnr_on_a_normal_tensor(options, wanted) -> None:
    """In bf16 too, which rounds at 2^-9, some 30 dB under the quantization error."""
    for x in (source("normal").x, source("normal").x.bfloat16()):
        actual = float(sqnr_db(x, fake_quantize(x, generator=seeded(35), **options)))
        assert actual == pytest.approx(wanted, abs=NUMBER_TOLERANCE)


# --- bias and clipping ---------------------------------------------------------------------------

# From theory, with each format's default scales. With E4M3 they move by 2e-4 with the phase of amax
# between two scales. MX formats lose up to a factor of max / 2^k, 8 / 6 for E2M1.
CLIPPED_GAINS = {
    ("nvfp4", "normal"): 0.9966,
    ("nvfp4", "uniform"): 0.9986,
    ("nvfp4", "student3"): 0.9935,
    ("nvint4", "normal"): 0.9966,
    ("mxfp4", "normal"): 0.9897,
    ("mxfp6-e2m3", "normal"): 0.9995,
    ("mxfp8-e4m3", "normal"): 0.9980,
    ("mxfp8-e5m2", "normal"): 0.9980,
}


@pytest.mark.parametrize(("fmt", "src"), CLIPPED_GAINS)
def test_scales_that_clip_bias_stochastic_rounding_by_a_known_gain(fmt, src) -> None:
    """E[x q] / E[x x]: what a gradient shrinks by, since maxima beyond the end clip, none grows."""
    data = source(src)
    options = {"fmt": fmt, "rounding": "stochastic"}
    wanted, actual = expectation(data, **options), measure(data, **options)
    assert wanted.gain == pytest.approx(CLIPPED_GAINS[fmt, src], abs=5e-4)
    assert actual.gain == pytest.approx(wanted.gain, abs=SIGMAS * actual.gain_error)
    assert 1 - actual.gain > SIGMAS * actual.gain_error  # a bias, not a fluctuation


@pytest.mark.parametrize("options", NOTHING_CLIPS, ids=case_id)
def test_nothing_clips_with_scales_rounded_up_and_the_gain_is_one(options) -> None:
    for src in SOURCES[:4]:
        assert Quantizer(**options).saturated(source(src).x) == 0
    for src, error in (("normal", 3e-4), ("outliers", 4e-3)):
        actual = measure(source(src), rounding="stochastic", **options)
        assert actual.gain == pytest.approx(1, abs=SIGMAS * actual.gain_error)
        assert actual.gain_error < error


CLIPPED_SHARE_NORMAL = 0.0346  # of NVFP4 with nearest scales: .0341 to .0353, by phase of amax


@pytest.mark.parametrize(
    "fmt", [name for name, fmt in theory.FORMATS.items() if fmt.scale != "fp32"]
)
def test_clipped_share_is_the_expected_one(fmt) -> None:
    for src in ("normal", "uniform", "student3"):
        data = source(src)
        wanted = expectation(data, fmt).clipped_share
        actual = float(Quantizer(fmt).saturated(data.x))
        # Elements of a block clip together: at worst whole blocks of 32 count as one draw each.
        spread = math.sqrt(32 * wanted * (1 - wanted) / data.x.numel())
        assert actual == pytest.approx(wanted, abs=SIGMAS * spread), src
        if fmt == "nvfp4" and src == "normal":
            assert wanted == pytest.approx(CLIPPED_SHARE_NORMAL, abs=7e-4)
