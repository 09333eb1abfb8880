"""Sums of rows with random signs, from which a split's directions are found."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.transforms.spectral import find_basis, sample_rows, sum_count, sum_rows
from numerics.helpers import gaussian
from numerics.kernels.sums_cases import SumsCases


class TestOperations(SumsCases):
    kernels = "reference"
    device = "cpu"


def taken(t: int, count: int, key: Key, row_mask: Tensor | None = None) -> Tensor:
    """Which row is in which sum, and with which sign: [n t] of -1, 0 and 1."""
    return sum_rows(torch.eye(t), count, key, row_mask)


def held(x: Tensor, basis: Tensor) -> float:
    """Share of the energy of x [t c] in orthonormal columns [c k]."""
    return float((x @ basis).square().sum() / x.square().sum())


@given(t=st.integers(1, 70), count=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_every_row_is_in_one_sum_with_a_sign(t, count, seed):
    signs = taken(t, count, Key(seed))
    assert torch.equal(signs.abs().sum(0), torch.ones(t))
    assert set(signs.unique().tolist()) <= {-1.0, 0.0, 1.0}
    group = max(t // count, 1)
    assert signs.shape[0] == sum_count(t, count) == math.ceil(t / group)
    assert min(count, t) <= signs.shape[0]
    assert (signs.abs().sum(1) <= group).all()


def test_fewer_than_two_rows_a_sum_are_left_alone():
    x = gaussian(19, 5)
    assert sum_rows(x, 10, Key(1)) is x
    assert sum_rows(x, 100, Key(1)) is x
    mask = torch.arange(19) % 3 > 0
    assert torch.equal(sum_rows(x, 10, Key(1), mask), x * mask[:, None])


def test_the_mean_gram_matrix_is_that_of_the_rows():
    """Over 4,000 keys; the products of different rows have random signs and average out."""
    x = gaussian(24, 3, seed=1)
    total = torch.zeros(3, 3)
    for key in range(4000):
        sums = sum_rows(x, 6, Key(key))
        total += sums.T @ sums
    gram = x.T @ x
    assert (total / 4000 - gram).abs().max() < 0.02 * gram.diagonal().max()


def test_signs_and_partners_depend_on_the_key():
    one, again, other = (taken(40, 10, Key(key)) for key in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one.abs(), other.abs())


def test_both_signs_are_as_frequent():
    signs = torch.stack([taken(64, 8, Key(key)).sum(0) for key in range(200)])
    assert abs(float(signs.mean())) < 4 / math.sqrt(signs.numel())


def test_a_mask_without_rows_is_ignored():
    x = gaussian(40, 6)
    mask = torch.zeros(40, dtype=torch.bool)
    assert torch.equal(sum_rows(x, 10, Key(5), mask), sum_rows(x, 10, Key(5)))


def test_right_padding_leaves_few_sums_empty():
    """Sequences of 64 of which the first 16 are text: two of eight rows of a sum, in the mean."""
    mask = torch.arange(1024) % 64 < 16
    sums = taken(1024, 128, Key(6), mask).abs().sum(1)
    assert sums.sum() == 256
    assert (sums > 0).float().mean() > 0.8  # 1 - (3/4)^8 = .90 of them


@pytest.mark.parametrize("length", [96, 128, 512])
def test_first_tokens_of_sequences_are_found_by_every_key(length):
    """They are alike and large: were they all in one sum, random signs would often cancel them."""
    first = gaussian(1, 32, seed=2)
    x = gaussian(2048, 32, seed=3)
    x[::length] = 300 * first
    direction = (first / first.norm()).T
    for key in range(30):
        basis = find_basis(x, 1, min_rows=128, key=Key(key), sample_frac=0.01, summed=True)
        assert held(direction.T, basis) > 0.99


def test_few_large_rows_are_found_where_sampled_rows_miss_them():
    x = gaussian(4096, 64, seed=4)
    large = gaussian(3, 64, seed=5) * 30
    x[[17, 1500, 4000]] = large
    options = {"min_rows": 64, "sample_frac": 0.01, "n_iter": 4}
    found, missed = (
        [held(large, find_basis(x, 3, key=Key(k), summed=s, **options)) for k in range(20)]
        for s in (True, False)
    )
    assert sum(found) / 20 > 0.9
    assert sum(missed) / 20 < 0.3


def test_sums_hold_more_energy_than_as_many_rows():
    """Of a matrix whose rows differ in size, as tokens do."""
    x = gaussian(4096, 64, seed=6) * torch.logspace(0, -1.5, 64)
    x *= torch.logspace(0, -2, 4096)[gaussian(4096, seed=7).argsort()][:, None]
    share = {}
    for choose in (sum_rows, sample_rows):
        best = []
        for key in range(10):
            rows = choose(x, 64, Key(key))
            best.append(held(x, torch.linalg.svd(rows, full_matrices=False).Vh[:8].T))
        share[choose] = sum(best) / len(best)
    assert share[sum_rows] > share[sample_rows] + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_sums_are_the_same(masked):
    compiled = torch.compile(sum_rows, fullgraph=True, dynamic=True, backend="aot_eager")
    for t in (40, 41, 97):
        x = gaussian(t, 6)
        mask = torch.arange(t) % 5 != 2 if masked else None
        assert torch.equal(compiled(x, 10, Key(8), mask), sum_rows(x, 10, Key(8), mask))
