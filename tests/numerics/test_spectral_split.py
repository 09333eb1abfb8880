"""spectral_split against a full SVD in float64, and what it owes for any input whatever."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import reference as ref
import torch
from tensors import assert_same
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.transforms import SpectralSplit, decompose_weight, spectral_split
from metis_hf.transforms.spectral import sample_rows
from numerics.helpers import gaussian

# Captured energy relative to the best rank 16 of 8192 x 1024 from 1 % of the rows: measured with
# an exact SVD of the sampled rows as .99 and .93, means over draws that agree to .02.
CAPTURED_1_PERCENT_GAP_5 = 0.97
CAPTURED_1_PERCENT_GAP_2 = 0.91
# What the randomized range finder may lose to an exact SVD of as many random rows.
CAPTURED_LOSS_TO_EXACT_SAMPLE = 0.02
# All rows: two power iterations sharpen a gap of g to g^5, so a gap of 5 leaves under 1e-6;
# with no gap (sigma = i^-.5) measured as .985.
CAPTURED_ALL_ROWS_GAP_5 = 0.9999
CAPTURED_ALL_ROWS_NO_GAP = 0.97

FP32_TOLERANCE = 1e-5  # about 100 ulps: sums of up to 1024 fp32 products
SKETCH_TOLERANCE = 1e-4  # singular values of a basis found through a fp32 Gram matrix


def spectrum(size: int, rank: int, gain: float) -> Tensor:
    """i^-.5 with the first `rank` values multiplied by `gain`."""
    s = torch.arange(1, size + 1, dtype=torch.float64) ** -0.5
    s[:rank] *= gain
    return s


def with_spectrum(t: int, s: Tensor, *, seed: int = 0) -> Tensor:
    """[t c] fp32 with the singular values s [c] and random singular vectors, t >= c."""
    left = torch.linalg.qr(gaussian(t, len(s), seed=seed)).Q
    right = torch.linalg.qr(gaussian(len(s), len(s), seed=seed + 1)).Q
    return (left * s.float()) @ right


def recombined(split: SpectralSplit) -> Tensor:
    return (split.u.double() * split.s.double()) @ split.vh.double() + split.residual.double()


def assert_close_to_scale(actual: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Largest deviation relative to the largest wanted value (or to 1 for all zeros)."""
    scale = wanted.double().abs().max().item() or 1.0
    assert (actual.double() - wanted.double()).abs().max().item() <= tolerance * scale


def assert_orthonormal_rows(vh: Tensor) -> None:
    eye = torch.eye(vh.shape[0], dtype=torch.float64)
    torch.testing.assert_close(vh.double() @ vh.double().T, eye, rtol=0, atol=FP32_TOLERANCE)


def assert_valid(split: SpectralSplit, x: Tensor, rank: int) -> None:
    """What holds for every finite input."""
    t, c = x.shape
    shapes = [(t, rank), (rank,), (rank, c), (t, c)]
    assert [tuple(part.shape) for part in split] == shapes
    assert all(part.isfinite().all() for part in split)
    assert split.s.dtype == torch.float32
    assert (split.s >= 0).all()
    assert (split.s.diff() <= 0).all()
    assert_orthonormal_rows(split.vh)
    lengths = split.u.double().norm(dim=0)[split.s > 0]
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=FP32_TOLERANCE)
    assert_close_to_scale(recombined(split), x, FP32_TOLERANCE)


# --- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32), (7, 1), (1, 7)], ids=str)
def test_full_rank_is_the_svd(shape) -> None:
    x, rank = gaussian(*shape, seed=1), min(shape)
    split = spectral_split(x, rank)
    assert_valid(split, x, rank)
    assert_close_to_scale(split.residual, torch.zeros_like(x), SKETCH_TOLERANCE * x.abs().max())
    best = ref.spectral_split(x.numpy(), rank)
    np.testing.assert_allclose(split.s.numpy(), best.s, rtol=0, atol=SKETCH_TOLERANCE * best.s[0])


@pytest.mark.parametrize("shape", [(300, 64), (64, 64), (100, 200)], ids=str)
def test_dominant_part_of_a_gapped_matrix_is_that_of_the_svd(shape) -> None:
    rank = 6
    sizes = torch.tensor([60.0, 50, 40, 30, 25, 20])
    u = torch.linalg.qr(gaussian(shape[0], rank, seed=2)).Q
    v = torch.linalg.qr(gaussian(shape[1], rank, seed=3)).Q
    x = (u * sizes) @ v.T + 0.01 * gaussian(*shape, seed=4)
    split = spectral_split(x, rank)
    assert_valid(split, x, rank)
    best = ref.spectral_split(x.numpy(), rank)
    np.testing.assert_allclose(split.s.numpy(), best.s, rtol=SKETCH_TOLERANCE)
    cosines = np.abs(np.sum(split.vh.numpy() * best.vh, axis=1))
    np.testing.assert_allclose(cosines, 1, atol=1e-3)
    cosines = np.abs(np.sum(split.u.numpy() * best.u, axis=0))
    np.testing.assert_allclose(cosines, 1, atol=1e-3)
    assert np.linalg.norm(split.residual) == pytest.approx(
        np.linalg.norm(best.residual), rel=SKETCH_TOLERANCE
    )


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (200, 32), (33, 17), (1, 20), (20, 1)])
def test_parts_always_add_up(shape) -> None:
    """Whatever was sampled, the residual takes what the subspace missed."""
    x = gaussian(*shape, seed=5)
    for rank, sample_frac in itertools.product((1, min(5, *shape)), (1.0, 0.3, 0.01)):
        assert_valid(spectral_split(x, rank, sample_frac=sample_frac), x, rank)


def test_every_option_leaves_a_valid_split() -> None:
    x = gaussian(50, 30, seed=6)
    for options in (
        {"oversample": 0},
        {"n_iter": 0},
        {"oversample": 1000},
        {"min_rows": 1000},
        {"min_rows": 1, "sample_frac": 1e-6},
        {"key": Key(12345)},
    ):
        assert_valid(spectral_split(x, 4, **options), x, 4)


def test_lower_rank_keeps_no_more_energy() -> None:
    x = gaussian(60, 40, seed=7)
    norms = [spectral_split(x, rank).residual.norm().item() for rank in range(1, 41)]
    assert all(b <= a + FP32_TOLERANCE * norms[0] for a, b in itertools.pairwise(norms))


@pytest.mark.parametrize("exponent", [-90, 90])
def test_size_of_the_input_does_not_matter(exponent) -> None:
    """The squares leave fp32: Gram matrix and norms have to be taken of x / amax."""
    x = gaussian(40, 20, seed=8)
    factor = 2.0**exponent
    plain, scaled = spectral_split(x, 3), spectral_split(x * factor, 3)
    assert_valid(scaled, x * factor, 3)
    torch.testing.assert_close(scaled.s, plain.s * factor, rtol=FP32_TOLERANCE, atol=0)


# --- how good the subspace is --------------------------------------------------------------------

ROWS, COLUMNS, RANK = 8192, 1024, 16


@pytest.fixture(scope="module")
def factors() -> tuple[Tensor, Tensor]:
    left = torch.linalg.qr(gaussian(ROWS, COLUMNS, seed=9)).Q
    right = torch.linalg.qr(gaussian(COLUMNS, COLUMNS, seed=10)).Q
    return left, right


def captured(x: Tensor, vh: np.ndarray, s: Tensor) -> float:
    """Like ref.captured_energy, for a matrix whose singular values s are known."""
    basis = torch.linalg.qr(torch.from_numpy(vh).T.float()).Q
    return float((x @ basis).double().square().sum() / s[:RANK].square().sum())


@pytest.mark.parametrize(
    ("gain", "threshold"), [(5, CAPTURED_1_PERCENT_GAP_5), (2, CAPTURED_1_PERCENT_GAP_2)]
)
def test_one_percent_of_the_rows_finds_the_subspace(factors, gain, threshold) -> None:
    left, right = factors
    s = spectrum(COLUMNS, RANK, gain)
    x = (left * s.float()) @ right
    draws = 3
    ours, exact = [], []
    for draw in range(draws):
        split = spectral_split(x, RANK, sample_frac=0.01, key=Key(draw))
        ours.append(captured(x, split.vh.numpy(), s))
        rows = np.random.default_rng(draw).choice(ROWS, math.ceil(ROWS / 100), replace=False)
        exact.append(captured(x, ref.spectral_split(x[rows].numpy(), RANK).vh, s))
    assert np.mean(ours) >= threshold
    assert np.mean(ours) >= np.mean(exact) - CAPTURED_LOSS_TO_EXACT_SAMPLE


@pytest.mark.parametrize(
    ("gain", "threshold"), [(5, CAPTURED_ALL_ROWS_GAP_5), (1, CAPTURED_ALL_ROWS_NO_GAP)]
)
def test_all_rows_find_nearly_the_best_subspace(gain, threshold) -> None:
    x = with_spectrum(512, spectrum(256, RANK, gain), seed=11)
    split = spectral_split(x, RANK)
    assert ref.captured_energy(x.numpy(), split.vh.numpy()) >= threshold


def test_min_rows_is_a_floor_on_the_sample() -> None:
    """A floor of all rows is the same as sampling them all."""
    x = with_spectrum(256, spectrum(64, RANK, 5), seed=12)
    energies = {}
    for min_rows in (0, 256):
        vh = spectral_split(x, RANK, sample_frac=0.01, min_rows=min_rows).vh
        energies[min_rows] = ref.captured_energy(x.numpy(), vh.numpy())
    assert energies[256] >= CAPTURED_ALL_ROWS_GAP_5
    assert energies[0] < energies[256]


# --- difficult inputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("sample_frac", [1.0, 0.5])
def test_rank_deficient_matrix(sample_frac) -> None:
    x = gaussian(40, 2, seed=13) @ gaussian(2, 24, seed=14)
    split = spectral_split(x, 6, sample_frac=sample_frac)
    assert_valid(split, x, 6)
    assert_close_to_scale(split.residual, torch.zeros_like(x), SKETCH_TOLERANCE * x.abs().max())
    assert (split.s[2:] <= SKETCH_TOLERANCE * split.s[0]).all()
    # A sampled basis spans the right space but diagonalizes the sample: only the energy is fixed.
    assert split.s.norm().item() == pytest.approx(x.norm().item(), rel=SKETCH_TOLERANCE)
    if sample_frac == 1:
        best = ref.spectral_split(x.numpy(), 2)
        np.testing.assert_allclose(split.s[:2].numpy(), best.s, rtol=SKETCH_TOLERANCE)


def test_difficult_matrices() -> None:
    """Zeros, rows and columns of zeros, one row (in generation), equal rows, strides."""
    sparse = gaussian(40, 24, seed=15)
    sparse[3:20] = 0
    sparse[:, 5:20] = 0
    row, strided = gaussian(1, 24, seed=17), gaussian(24, 50, seed=19)
    for x, rank in (
        (torch.zeros(30, 12), 4),
        (sparse, 8),
        (row, 1),
        (row.expand(50, -1), 3),
        (strided.t(), 4),
        (strided[::2, ::3], 4),
    ):
        for sample_frac in (1.0, 0.25):
            split = spectral_split(x, rank, sample_frac=sample_frac)
            assert_valid(split, x, rank)
            if x.data_ptr() == row.data_ptr():
                assert split.s[0].item() == pytest.approx(x.norm().item(), rel=FP32_TOLERANCE)
                residual = split.residual.abs().max()
                assert residual <= FP32_TOLERANCE * x.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_input_is_decomposed_in_fp32(dtype) -> None:
    x = gaussian(50, 24, seed=18).to(dtype)
    split, wanted = spectral_split(x, 4), spectral_split(x.float(), 4)
    assert split.s.dtype == torch.float32
    for part, other in zip(split, wanted):
        torch.testing.assert_close(part.float(), other, rtol=0, atol=0)


@pytest.mark.parametrize("split", [spectral_split, decompose_weight])
def test_products_keep_their_precision_under_autocast(split) -> None:
    x = gaussian(64, 48)
    with torch.autocast("cpu", torch.bfloat16):
        inside = split(x, 4)
    assert_same(inside, split(x, 4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [slice(None), 3], ids=["whole row", "one element"])
def test_non_finite_rows_stay_visible_and_spare_the_basis(bad, columns) -> None:
    x = gaussian(60, 20, seed=20)
    rows = [0, 7, 59]
    for row in rows:
        x[row, columns] = bad
    for sample_frac in (1.0, 0.2):
        split = spectral_split(x, 4, sample_frac=sample_frac)
        assert split.vh.isfinite().all()
        assert_orthonormal_rows(split.vh)
        visible = ~(split.u.isfinite().all(dim=1) & split.residual.isfinite().all(dim=1))
        assert visible[rows].all()
        assert not recombined(split)[rows].isfinite().all(dim=1).any()


def test_only_non_finite_rows() -> None:
    split = spectral_split(torch.full((10, 6), math.nan), 2)
    assert split.vh.isfinite().all()
    assert not split.residual.isfinite().any()


@pytest.mark.parametrize(
    ("shape", "rank", "sample_frac", "message"),
    [
        ((8, 20), 9, 1.0, r"(?s)(?=.*\b9\b).*\b8\b"),
        ((5, 5), 50, 1.0, r"(?s)(?=.*\b50\b).*\b5\b"),
        ((4, 4), 0, 1.0, "0"),
        ((4, 4), -1, 1.0, "-1"),
        ((16,), 1, 1.0, "matrix"),
        ((2, 4, 4), 1, 1.0, "matrix"),
        ((4, 4), 1, 0.0, "sample_frac"),
        ((4, 4), 1, 1.5, "sample_frac"),
    ],
)
def test_refusals(shape, rank, sample_frac, message) -> None:
    with pytest.raises(ValueError, match=message):
        spectral_split(torch.ones(shape), rank, sample_frac=sample_frac)


# --- randomness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_frac", [1.0, 0.1])
def test_equal_keys_give_equal_splits(sample_frac) -> None:
    """Activation checkpointing recomputes the forward pass and has to meet the same split."""
    x = gaussian(200, 24, seed=21)
    options = {"sample_frac": sample_frac, "row_mask": torch.arange(200) % 2 == 0}
    before = torch.get_rng_state()
    first = spectral_split(x, 4, key=Key(3), **options)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(7)  # the state of the global generator plays no part
    again = spectral_split(x, 4, key=Key(3), **options)
    assert_same(again, first)
    if sample_frac < 1:  # another key samples other rows
        other = spectral_split(x, 4, key=Key(4), **options)
        assert not torch.allclose(first.vh.abs(), other.vh.abs(), atol=1e-3)


def test_sampled_rows_are_one_of_each_stretch_and_differ_between_keys():
    x = torch.arange(64.0)[:, None]
    picks = torch.stack([sample_rows(x, 16, Key(key)).flatten() for key in range(200)])
    assert torch.equal(picks // 4, torch.arange(16.0).expand(200, 16))
    assert all(len(set(place)) == 4 for place in picks.T.tolist())
