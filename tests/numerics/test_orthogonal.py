"""Bases without synchronization, and the randomized SVD, against LAPACK's."""

from __future__ import annotations

import pytest
import torch

from metis_hf.noise import Key, uniform
from metis_hf.transforms.orthogonal import next_basis
from metis_hf.transforms.spectral import dominant_subspace
from numerics.helpers import gaussian

ORTHONORMAL = 1e-5  # fp32


SAMPLES = {
    "flat": gaussian(272, 96, seed=2),
    "power law": (gaussian(272, 96, seed=3) * torch.arange(1, 97) ** -1.0),
    "rank 3": gaussian(272, 3, seed=4) @ gaussian(3, 96, seed=5),
    "one giant row": torch.cat([1e6 * gaussian(1, 96, seed=6), gaussian(271, 96, seed=7)]),
    "ill-conditioned": gaussian(272, 96, seed=8) * 10 ** torch.linspace(0, -8, 96),
    "integers": gaussian(272, 96, seed=9).round(),
    "fewer rows than the sketch": gaussian(12, 96, seed=10),
    "fewer columns": gaussian(272, 11, seed=11),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_randomized_svd_is_lapacks(name):
    """By Householder QR in fp64, of the same sketch: energy, and singular values in order."""
    rank = 9
    sample, eye = SAMPLES[name].double(), torch.eye(rank, dtype=torch.float64)
    sketch = uniform((len(sample), min(rank + 8, *sample.shape)), Key(3)).double() - 0.5
    basis = torch.linalg.qr(sample.T @ sketch).Q
    basis = torch.linalg.qr(sample.T @ (sample @ basis)).Q
    exact = torch.linalg.svdvals(sample @ basis)[:rank]
    for dtype in (torch.float32, torch.float64):
        ours = dominant_subspace(sample.to(dtype), rank, n_iter=1, key=Key(3))
        assert ours.dtype is dtype
        ours = ours.double()
        torch.testing.assert_close(ours.T @ ours, eye, rtol=0, atol=ORTHONORMAL)
        lengths = (sample @ ours).norm(dim=0)
        atol = 1e-4 * exact[0].item()
        torch.testing.assert_close(lengths, exact, rtol=0, atol=atol)
        assert (lengths.diff() <= atol).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_basis_is_made_of_each_row_and_those_before(dtype):
    """As by Gram and Schmidt: LAPACK's Q with the signs of R's diagonal."""
    y = (gaussian(20, 50) * torch.logspace(2, -2, 20)[:, None]).to(dtype)
    q, r = torch.linalg.qr(y.double().T)
    wanted = (q * r.diagonal().sign()).T
    for passes in (1, 2):
        found = next_basis(y, gaussian(20, 50, seed=1).to(dtype) / 7, passes=passes)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4)
