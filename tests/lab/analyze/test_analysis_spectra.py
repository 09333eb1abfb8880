"""Elbows with known answers; singular values, alignment and errors against independent oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from metis_hf.lab.analyze import alignment, distributions, spectra
from metis_hf.lab.analyze.spectra import Svd, elbow, noise_spectrum, singular_values
from metis_hf.transforms import spectral_split

FP32 = torch.finfo(torch.float32).eps


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(rows, columns, sigma):
    """A matrix with the given singular values and random directions, fp64."""
    u = torch.linalg.qr(gaussian(rows, len(sigma), seed=1).double()).Q
    v = torch.linalg.qr(gaussian(columns, len(sigma), seed=2).double()).Q
    return (u * torch.as_tensor(sigma, dtype=torch.float64)) @ v.T


def test_elbow_of_exponentials_and_corners():
    x = np.linspace(0, 1, 2001)
    for rate in (8.0, 20.0, 60.0):
        # y = exp(-a x): curvature a^2 y / (1 + a^2 y^2)^1.5 is greatest where a^2 y^2 = 1/2.
        expected = math.log(rate * math.sqrt(2)) / rate
        assert elbow(np.exp(-rate * x)) / 2000 == pytest.approx(expected, rel=0.05)
    x = np.arange(1000)
    for corner in (10, 100, 700):
        values = np.where(x <= corner, 10 - 9 * x / corner, 1 - 0.9 * (x - corner) / (999 - corner))
        # The smoothing blurs a corner by its own width, 1 % of the arc.
        assert abs(elbow(values) - corner) <= 10
    values = np.exp(-np.linspace(0, 12, 400))  # scale and offset do not matter
    assert elbow(values) == elbow(1e-9 * values) == elbow(3 + values)


def test_no_elbow_where_nothing_bends():
    """Nor where a curve only turns steeper: it has no dominant head."""
    for values in (np.ones(50), np.linspace(2, 1, 50), np.array([3.0, 2, 1]), np.full(9, np.nan)):
        assert elbow(values) is None
    assert elbow(np.sqrt(1 - np.linspace(0, 1, 500) ** 2)) in (None, 1)


def test_singular_values_against_lapack(monkeypatch):
    for shape in ((96, 64), (64, 96), (132, 130)):
        monkeypatch.setattr(spectra, "EXACT_SIDE", 100)
        x = gaussian(*shape)
        expected = torch.linalg.svdvals(x.double())
        error = (singular_values(x).double() - expected).abs().max()
        # Gram route: |s_hat^2 - s^2| <= c eps s_0^2 sqrt(l), so |s_hat - s| <= the root of that.
        bound = expected[0] * (FP32 * math.sqrt(max(shape))) ** 0.5
        assert error <= (bound if min(shape) > 100 else 10 * FP32 * expected[0])


def test_gram_route_is_accurate_where_it_promises(monkeypatch):
    monkeypatch.setattr(spectra, "EXACT_SIDE", 1)
    sigma = np.geomspace(1, 1e-5, 60)
    x = with_spectrum(60, 200, sigma).float()
    found = singular_values(x).double().numpy()
    drowned = (FP32 * math.sqrt(200)) ** 0.5
    clear = sigma > 10 * drowned  # (s_hat / s - 1) <= (drowned / s)^2 / 2
    assert clear.sum() >= 20
    assert np.abs(found / sigma - 1)[clear].max() <= 0.5 * 0.1**2
    assert found[~clear].max() <= 11 * drowned


def test_svd_gives_the_matrix_back(monkeypatch):
    for shape, exact_side in (((40, 70), 1), ((70, 40), 1), ((70, 40), 1024)):
        monkeypatch.setattr(spectra, "EXACT_SIDE", exact_side)
        x = gaussian(*shape)
        svd = Svd.of(x)
        whole = slice(0, 40)
        again = (svd.left(whole) * svd.s) @ svd.right(whole).T
        assert (again - x).norm() / x.norm() < 200 * FP32
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        third = (svd.left([3]) * svd.s[3]) @ svd.right([3]).T
        assert torch.allclose(third, s[3] * torch.outer(u[:, 3], vh[3]), atol=1e-4)


def test_randomized_split_is_within_its_bound():
    # Halko, Martinsson, Tropp (arXiv 0909.4061), corollary 10.10 with q power iterations:
    # E|A - QQ^T A| <= (1 + sqrt(k / (p - 1)) + e sqrt(k + p) / p sqrt(min - k))^(1 / (2q + 1)) s_k
    rank, oversample, n_iter = 16, 8, 4
    sigma = 1 / np.arange(1, 201)
    x = with_spectrum(200, 300, sigma)
    split = spectral_split(x, rank, oversample=oversample, n_iter=n_iter)
    growth = 1 + math.sqrt(rank / (oversample - 1))
    growth += math.e * math.sqrt(rank + oversample) / oversample * math.sqrt(200 - rank)
    # Twice: cutting the basis back to k directions costs at most another s_k.
    bound = 2 * growth ** (1 / (2 * n_iter + 1)) * sigma[rank]
    assert sigma[rank] <= float(torch.linalg.matrix_norm(split.residual, 2)) * 1.0001 <= bound
    assert np.abs(split.s.numpy() / sigma[:rank] - 1).max() < 1e-3


def test_noise_spectrum_is_the_spectrum_of_normal_entries():
    """It has an elbow too: a small share of components left of it is no sign of anisotropy."""
    for shape in ((400, 400), (200, 800)):
        x = gaussian(*shape).double()
        measured = torch.linalg.svdvals(x).numpy()
        predicted = noise_spectrum(*shape, energy=float(x.square().sum()))
        # Eigenvalues of such matrices are rigid: within about one spacing of the quantiles.
        assert np.abs(measured - predicted).max() < 0.03 * measured[0]
        assert np.square(predicted).sum() == pytest.approx(float(x.square().sum()))
    data = spectra.spectrum_data(torch.linalg.svdvals(gaussian(512, 1024)), (512, 1024))
    assert data["fraction"] < 0.03
    assert data["noise_fraction"] < 0.03
    # The leading 3 % hold less than 3 % ((1 + sqrt(1/2))^2 = 2.9 times the mean eigenvalue).
    assert data["energy"] < 0.09


def test_canonical_correlation_against_scipy():
    a = torch.linalg.qr(gaussian(60, 5).double()).Q
    b = torch.linalg.qr(gaussian(60, 5, seed=3).double()).Q
    angles = scipy.linalg.subspace_angles(a.numpy(), b.numpy())
    expected = np.mean(np.cos(angles) ** 2)
    assert alignment.mean_squared_correlation(a, b) == pytest.approx(expected, rel=1e-10)
    assert alignment.mean_squared_correlation(a, a) == pytest.approx(1)
    assert alignment.mean_squared_correlation(a, a[:, :2]) == pytest.approx(2 / 5)


def test_subspace_is_the_svds():
    for shape in ((90, 40), (30, 80)):
        x = gaussian(*shape)
        _, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
        found = alignment.subspace(x, 6)
        assert alignment.mean_squared_correlation(vh[:6].T, found) == pytest.approx(1, abs=1e-6)


def test_alignment_grows_with_the_sample_and_repeats():
    x = (with_spectrum(640, 48, np.r_[np.full(4, 20.0), np.full(44, 1.0)])).float()
    data = alignment.alignment_data(x, 4, length=16)
    for unit, total in (("row", 640), ("sequence", 40)):
        curve = data[f"by_{unit}"]
        assert curve["count"][-1] == total
        assert curve["mean"][-1] == pytest.approx(1, abs=1e-6)
        assert curve["mean"][0] < curve["mean"][-2]
        assert all(
            low <= mean <= high
            for low, mean, high in zip(*(curve[k] for k in ("low", "mean", "high")))
        )
    assert data == alignment.alignment_data(x, 4, length=16)
    # 1 row of 640 spans one direction of four.
    assert data["by_row"]["mean"][0] <= 1 / 4 + 1e-9


def test_sequences_are_drawn_whole():
    """Equal rows inside each sequence: a sequence tells no more than one of its rows."""
    rows = gaussian(20, 12)
    x = rows.repeat_interleave(10, dim=0)
    data = alignment.alignment_data(x, 12, length=10)
    half = data["by_sequence"]["count"].index(10)
    assert data["by_sequence"]["mean"][half] == pytest.approx(10 / 12)


def test_removed_components():
    counts = [distributions.removed_components(rank) for rank in (4096, 128, 336, 10)]
    assert counts == [128, 4, 8, 1]


def test_residual_data_of_a_spike():
    sigma = np.r_[1000.0, 100.0, np.full(62, 1.0)]
    x = with_spectrum(64, 96, sigma).float()
    data = distributions.residual_data(x, Svd.of(x))
    assert data["removed"] == 2
    rest = spectral_split(x, 2, n_iter=8).residual
    assert data["residual_width"]["max"] == pytest.approx(float(rest.abs().max()), rel=0.02)
    assert data["narrowing"]["max"] > 10
    for edges, density in (("edges", "full"), ("residual_edges", "residual")):
        assert np.dot(np.diff(data[edges]), data[density]) == pytest.approx(1)


def test_magnitudes_count_zeros_apart():
    x = torch.tensor([[0.0, 1.0, -2.0, 3.0]])
    copy = torch.tensor([[0.0, 0.0, -2.0, 3.0]])
    data = distributions.magnitude_data(x, {"nvfp4": copy})
    assert data["zero"] == {"before": 0.25, "nvfp4": 0.5}
    for name in ("before", "nvfp4"):
        area = np.dot(np.diff(data["edges"]), data["density"][name])
        assert area + data["zero"][name] == pytest.approx(1)
