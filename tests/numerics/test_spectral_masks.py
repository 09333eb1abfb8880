"""Rows that must not be sampled, and gradients that must not flow, in spectral splits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tensors import assert_same

from metis_hf.noise import Key
from metis_hf.transforms import spectral_split
from numerics.helpers import gaussian, seeded
from numerics.test_spectral_split import SKETCH_TOLERANCE, assert_orthonormal_rows, assert_valid

# --- row_mask (True keeps a row) -----------------------------------------------------------------


@pytest.mark.parametrize("filler", [1e6, math.nan, math.inf])
@pytest.mark.parametrize("kept", [3, 30, 99])
def test_masked_rows_never_influence_the_basis(filler, kept) -> None:
    """Bit for bit, apart from the order: s is over all rows, and vh comes in descending s."""
    x = gaussian(100, 20, seed=24)
    mask = torch.zeros(100, dtype=torch.bool)
    mask[torch.randperm(100, generator=seeded(25))[:kept]] = True
    for key, sample_frac in itertools.product(range(3), (1.0, 0.2)):
        options = {"sample_frac": sample_frac, "row_mask": mask, "key": Key(key)}
        poisoned = torch.where(mask[:, None], x, torch.full_like(x, filler))
        wanted = spectral_split(x, 4, **options).vh
        actual = spectral_split(poisoned, 4, **options).vh
        assert sorted(actual.tolist()) == sorted(wanted.tolist())
        assert_orthonormal_rows(wanted)


def test_masked_rows_are_still_split() -> None:
    x = gaussian(100, 20, seed=26)
    mask = torch.arange(100) < 60
    assert_valid(spectral_split(x, 4, row_mask=mask), x, 4)


def test_mask_with_every_row_sampled_finds_the_kept_rows() -> None:
    """Two families of rows in orthogonal subspaces: the basis spans the kept family."""
    x = torch.zeros(100, 20)
    x[:60, :4] = gaussian(60, 4, seed=27)
    x[60:, 4:8] = 100 * gaussian(40, 4, seed=28)
    split = spectral_split(x, 4, row_mask=torch.arange(100) < 60)
    assert split.residual[:60].abs().max() <= SKETCH_TOLERANCE
    assert (split.vh[:, 4:].abs() <= SKETCH_TOLERANCE).all()


@pytest.mark.parametrize("kept", [5, 24, 39])
def test_mask_with_every_row_sampled_skips_no_kept_row(kept) -> None:
    """sample_frac=1 means all kept rows: at full rank none of them leaves a residual."""
    x = gaussian(40, 64, seed=29)
    mask = torch.zeros(40, dtype=torch.bool)
    mask[torch.randperm(40, generator=seeded(30))[:kept]] = True
    for key in range(5):
        split = spectral_split(x, kept, row_mask=mask, key=Key(key))
        assert split.residual[mask].abs().max() <= SKETCH_TOLERANCE * x.abs().max()


def test_mask_of_true_is_no_mask() -> None:
    x = gaussian(50, 20, seed=31)
    split = spectral_split(x, 4, row_mask=torch.ones(50, dtype=torch.bool))
    assert_same(split, spectral_split(x, 4))


def test_mask_of_false_is_no_error() -> None:
    """A batch of padding only: nothing to learn from, and nothing to fail on."""
    x = gaussian(50, 20, seed=32)
    assert_valid(spectral_split(x, 4, row_mask=torch.zeros(50, dtype=torch.bool)), x, 4)


# --- autograd ------------------------------------------------------------------------------------


def test_no_gradient_flows_through_the_decomposition() -> None:
    """The quantized operands carry the gradient; that of an SVD is undefined at equal values."""
    x = gaussian(20, 12, seed=33).requires_grad_()
    before = x.detach().clone()
    split = spectral_split(x, 3)
    assert not any(part.requires_grad for part in split)
    assert torch.equal(x.detach(), before)
