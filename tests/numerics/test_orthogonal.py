"""Eigenvectors and bases without synchronization, against LAPACK's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metis_hf.noise import Key, uniform
from metis_hf.transforms.orthogonal import eigenvectors
from metis_hf.transforms.spectral import dominant_subspace, fewest_rotations

WIDTH = 40
ORTHONORMAL = 1e-5  # fp32
# Energy that a basis of few rotations may lack, of what LAPACK's has.
LACKS, FLAT_LACKS = 1e-3, 5e-3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_values(values: Tensor, seed: int = 1) -> Tensor:
    """[w w] fp64 with these eigenvalues."""
    q = torch.linalg.qr(normal(len(values), len(values), seed=seed).double()).Q
    return (q * values.double()) @ q.T


INDEX = torch.arange(1, WIDTH + 1).double()
MATRICES = {
    "zero": torch.zeros(WIDTH, WIDTH).double(),
    "identity": torch.eye(WIDTH).double(),
    "ones": torch.ones(WIDTH, WIDTH).double(),  # all diagonal entries equal, and all others
    "rank 3": with_values((INDEX <= 3).double()),
    "slow decay": with_values(1 / INDEX),
    "fast decay": with_values(0.1**INDEX),
    "one giant": with_values(torch.where(INDEX == 1, 1e8, 1 / INDEX)),
    "pairs": torch.block_diag(*[torch.tensor([[1.0, 0.5], [0.5, 1.0]])] * 20).double(),
    "one column": torch.full((1, 1), 3.0).double(),
}


@pytest.mark.parametrize("name", MATRICES)
def test_eigenvectors_diagonalize_any_matrix(name):
    matrix = MATRICES[name]
    vectors = eigenvectors(matrix, rotations=12)
    eye = torch.eye(len(matrix), dtype=torch.float64)
    torch.testing.assert_close(vectors @ vectors.T, eye, rtol=0, atol=1e-8)
    wanted = torch.linalg.eigvalsh(matrix).flip(0)
    scale = max(wanted[0].item(), 1.0)
    similar = vectors @ matrix @ vectors.T
    torch.testing.assert_close(similar.diagonal(), wanted, rtol=0, atol=1e-4 * scale)
    assert (similar.diagonal().diff() <= 1e-12 * scale).all()
    if name != "slow decay":  # its close eigenvalues take longest
        assert (similar - similar.diagonal().diag()).abs().max() <= 1e-6 * scale


SAMPLES = {
    "flat": normal(272, 96, seed=2),
    "power law": (normal(272, 96, seed=3) * torch.arange(1, 97) ** -1.0),
    "rank 3": normal(272, 3, seed=4) @ normal(3, 96, seed=5),
    "one giant row": torch.cat([1e6 * normal(1, 96, seed=6), normal(271, 96, seed=7)]),
    "ill-conditioned": normal(272, 96, seed=8) * 10 ** torch.linspace(0, -8, 96),
    "integers": normal(272, 96, seed=9).round(),
    "fewer rows than the sketch": normal(12, 96, seed=10),
    "fewer columns": normal(272, 11, seed=11),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_few_rotations_keep_the_energy_of_an_exact_truncation(name):
    """Against the same range finder by Householder QR and LAPACK's eigenvectors."""
    rank = 9
    sample, eye = SAMPLES[name].double(), torch.eye(rank, dtype=torch.float64)
    sketch = uniform((len(sample), min(rank + 8, *sample.shape)), Key(3)).double() - 0.5
    basis = torch.linalg.qr(sample.T @ sketch).Q
    basis = torch.linalg.qr(sample.T @ (sample @ basis)).Q
    exact = torch.linalg.svdvals(sample @ basis)[:rank].square().sum()
    lacks = FLAT_LACKS if name in ("flat", "integers") else LACKS
    for dtype in (torch.float32, torch.float64):
        options = {"n_iter": 1, "key": Key(3), "rotations": fewest_rotations(rank + 8)}
        ours = dominant_subspace(sample.to(dtype), rank, **options)
        assert ours.dtype is dtype
        ours = ours.double()
        torch.testing.assert_close(ours.T @ ours, eye, rtol=0, atol=ORTHONORMAL)
        assert (sample @ ours).square().sum() >= exact * (1 - lacks)


def test_a_wider_sketch_rotates_more_often():
    assert [fewest_rotations(width) for width in (1, 17, 40, 64, 128)] == [5, 5, 5, 6, 7]
