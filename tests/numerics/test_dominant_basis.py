"""The basis of a split: its energy against numpy, and what it owes any sample."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.transforms.spectral import dominant_basis
from numerics.helpers import gaussian

ROWS, COLUMNS = 400, 96
# Filled-up directions of an fp64 sample lie below what one pass resolves; see gram_factor.
ORTHONORMAL = {torch.float32: 5e-6, torch.float64: 1e-6}
normal = partial(gaussian, dtype=torch.float64)


def with_spectrum(values: Tensor, seed: int = 1) -> Tensor:
    """[400 96] with these singular values."""
    u = torch.linalg.qr(normal(ROWS, COLUMNS, seed=seed)).Q
    return (u * values.double()) @ torch.linalg.qr(normal(COLUMNS, COLUMNS, seed=seed + 1)).Q.T


INDEX = torch.arange(1, COLUMNS + 1).double()
SAMPLES = {
    "flat": normal(ROWS, COLUMNS),
    "no gap": with_spectrum(INDEX**-0.5),
    "power law": with_spectrum(INDEX**-1.0),
    "steep": with_spectrum(0.7**INDEX),
    "one giant": with_spectrum(torch.where(INDEX == 1, 1e3, INDEX**-0.5)),
    "one giant row": torch.cat([1e3 * normal(1, COLUMNS), normal(ROWS - 1, COLUMNS, seed=5)]),
}
ODD = {
    "zero": torch.zeros(ROWS, COLUMNS),
    "ones": torch.ones(ROWS, COLUMNS),
    "rank 3": normal(ROWS, 3) @ normal(3, COLUMNS, seed=4),
    "one row": torch.cat([normal(1, COLUMNS), torch.zeros(ROWS - 1, COLUMNS)]),
    "one entry": torch.eye(ROWS, COLUMNS) * (torch.arange(COLUMNS) == 7),
    "equal columns": normal(ROWS, 1).expand(ROWS, COLUMNS),
    "huge": 1e37 * normal(ROWS, COLUMNS),
    "tiny": 1e-37 * normal(ROWS, COLUMNS),
    "both": torch.cat([1e37 * normal(9, COLUMNS), 1e-37 * normal(ROWS - 9, COLUMNS, seed=6)]),
    "NaN": torch.full((ROWS, COLUMNS), torch.nan),
    "infinite": torch.full((ROWS, COLUMNS), -torch.inf),
    "as many rows as directions": normal(8, COLUMNS),
    "as many columns": normal(ROWS, 8),
    "one column": normal(ROWS, 1),
}


def assert_orthonormal(basis: Tensor, columns: int, rank: int) -> None:
    assert basis.shape == (columns, rank)
    gram = basis.double().T @ basis.double()
    eye = torch.eye(rank, dtype=torch.float64)
    torch.testing.assert_close(gram, eye, rtol=0, atol=ORTHONORMAL[basis.dtype])


def power_of_sketch(sample: np.ndarray, rank: int, products: int, draws: int) -> np.ndarray:
    """Energy that the exact subspace iteration of Gaussian sketches holds, one number a draw."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(draws):
        basis = np.linalg.qr(sample.T @ rng.standard_normal((len(sample), rank)))[0]
        for _ in range(products):
            basis = np.linalg.qr(sample.T @ (sample @ basis))[0]
        held.append(np.square(sample @ basis).sum())
    return np.array(held)


@pytest.mark.parametrize("products", [0, 1, 2])
@pytest.mark.parametrize("name", SAMPLES)
def test_it_holds_the_energy_of_exact_subspace_iteration(name, products):
    """The means over draws of sketches differ by no more than four of their standard errors."""
    sample, rank, draws = SAMPLES[name], 8, 24
    wanted = power_of_sketch(sample.numpy(), rank, products, draws)
    for dtype in (torch.float32, torch.float64):
        held = []
        for key in range(draws):
            basis = dominant_basis(sample.to(dtype), rank, n_iter=products, key=Key(key))
            assert basis.dtype is dtype
            assert_orthonormal(basis, COLUMNS, rank)
            held.append((sample @ basis.double()).square().sum().item())
        error = np.hypot(np.std(held, ddof=1), wanted.std(ddof=1)) / draws**0.5
        lost = 1e-6 * wanted.mean()  # to orthonormality
        assert abs(np.mean(held) - wanted.mean()) <= 4 * error + lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ODD)
def test_it_is_orthonormal_whatever_the_sample(name, dtype):
    sample = ODD[name].to(dtype)
    rank = min(8, *sample.shape)
    for n_iter in (0, 1, 3):
        basis = dominant_basis(sample, rank, n_iter=n_iter)
        assert_orthonormal(basis, sample.shape[1], rank)


def test_all_directions_of_a_small_rank_are_found():
    sample = ODD["rank 3"]
    for key in map(Key, range(10)):
        basis = dominant_basis(sample.float(), 8, key=key).double()
        left = sample - sample @ basis @ basis.T
        assert left.norm() <= 1e-5 * sample.norm()


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_the_scale_of_the_sample_does_not_matter(factor):
    sample = SAMPLES["no gap"].float()
    assert torch.equal(dominant_basis(sample, 8), dominant_basis(sample * factor, 8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_entries_that_are_not_finite_count_as_zero(bad):
    sample = SAMPLES["power law"].float()
    zeroed, poisoned = sample.clone(), sample.clone()
    zeroed[5, 3:9], poisoned[5, 3:9] = 0.0, bad
    assert torch.equal(dominant_basis(poisoned, 8), dominant_basis(zeroed, 8))


def test_a_key_decides_and_no_gradient_flows():
    sample = SAMPLES["flat"].float().requires_grad_()
    first = dominant_basis(sample, 8, key=Key(1))
    assert torch.equal(first, dominant_basis(sample, 8, key=Key(1)))
    assert not torch.equal(first, dominant_basis(sample, 8, key=Key(2)))
    assert not first.requires_grad


def test_nothing_waits_for_the_device():
    """A factorization after the sketch, one after each product, and one more at the end."""

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Counts() as counts:
        dominant_basis(SAMPLES["flat"].float(), 8)
    factors = [name for name in counts.names if "cholesky" in name]
    assert len(factors) == 4
    waiting = ("eig", "svd", "qr", "item", "_local_scalar", "nonzero")
    assert not any(word in name for name in counts.names for word in waiting)
