"""Rotations of whole dimensions and mean removal, each against its formula in float64."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from design import cases, some_slow
from layers.layer_tools import Exact
from numerics.cases import assert_same_bits

from metis_hf.noise import Key
from metis_hf.numerics import MXFP4, Quantizer
from metis_hf.operands import Clamped, DifferentiableEstimator, HotChannels, RandomHadamard
from metis_hf.operands.conditioners.mean import MeanRemoved, row_mean
from metis_hf.operands.conditioners.rotated import FullHadamard, RandomKronecker
from metis_hf.transforms import rotate, unrotate
from metis_hf.transforms.rotation import (
    LARGEST_RANDOM,
    make_rotation,
    random_orthogonal,
    rotate_all,
    rotation_of,
    unrotate_all,
)

CONDITIONERS = [
    FullHadamard(5),
    FullHadamard(5, across=True),
    RandomKronecker(5),
    RandomKronecker(5, across=True),
    MeanRemoved(),
    MeanRemoved(FullHadamard(5)),
]
WITH_OUTLIERS = [Clamped(), Clamped(alpha=0.9), HotChannels(), DifferentiableEstimator()]
QUANTIZERS = [
    Quantizer(),
    Quantizer(rounding="stochastic", scale_rounding="up"),
    Quantizer(tile="square"),
    Quantizer(scale_rule="four-over-six"),
    Quantizer(MXFP4, rounding="stochastic"),
]
SHAPES = [(37, 70), (64, 48), (1, 70), (37, 1), (1, 1), (2, 2053)]
SIZES = [1, 2, 37, 70, 128, 768, 2053]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
KINDS = ["hadamard", "kronecker"]
KEY = Key(3)
UNIT32, UNIT64 = 2.0**-24, 2.0**-53
FACTORS = 4  # of a rotation, at most: one chain of sums each, and the signs


def matrix(shape, scale=1.0):
    """Columns of different size, and a mean."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g) + 2 * torch.randn(1, shape[1], generator=g)
    return x * torch.logspace(0, -1, shape[1]) * scale


def ids(value):
    return value.fmt.name if isinstance(value, Quantizer) else str(value)


def dense(kind, n, seed=5, dtype=torch.float64):
    """The rotation as a matrix [n n]."""
    eye = torch.eye(n, dtype=dtype)
    return rotate_all(eye, rotation_of(kind, n, seed, eye), dim=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_rotation_is_orthogonal_and_comes_back(kind, n):
    r, x = dense(kind, n), matrix((n, 5)).double()
    assert (r @ r.T - torch.eye(n)).abs().max() < 4 * FACTORS * n * UNIT64
    rotation = rotation_of(kind, n, 5, x)
    bound = {"rtol": 0, "atol": 4 * FACTORS * n * UNIT64 * x.abs().max().item()}
    torch.testing.assert_close(rotate_all(x, rotation, dim=0), r @ x, **bound)
    torch.testing.assert_close(rotate_all(x.T, rotation, dim=1), (r @ x).T, **bound)
    for dtype, unit in ((torch.float32, UNIT32), (torch.float64, UNIT64)):
        for shape, dim in (((n, 3), 0), ((3, n), 1), ((3, n), -1)):
            x = matrix(shape).to(dtype)
            rotation = rotation_of(kind, n, 5, x)
            rotated = rotate_all(x, rotation, dim=dim)
            assert rotated.shape == x.shape
            assert rotated.dtype is dtype
            back = unrotate_all(rotated, rotation, dim=dim)
            assert (back - x).norm() <= 4 * FACTORS * n**0.5 * unit * x.norm()


def test_hadamard_is_sylvesters_times_a_random_rest():
    """256 x 3: entries of the first factor by popcount, signs and the rest from the rotation."""
    rotation = make_rotation("hadamard", 768, 5, torch.device("cpu"), torch.float64)
    assert set(rotation.signs.tolist()) == {-1.0, 1.0}
    sylvester = [[(-1) ** (i & j).bit_count() / 16 for j in range(256)] for i in range(256)]
    size, rest = rotation.factors[-1]
    assert size == 3
    expected = np.kron(sylvester, rest.numpy()) * rotation.signs.numpy()
    np.testing.assert_allclose(dense("hadamard", 768).numpy(), expected, rtol=0, atol=1e-14)


def test_kronecker_is_the_product_of_its_factors():
    rotation = make_rotation("kronecker", 48, 5, torch.device("cpu"), torch.float64)
    (a, first), (b, second) = rotation.factors
    assert (a, b) == (6, 8)
    order = rotation.order.numpy()
    assert sorted(order) == list(range(48))
    expected = np.kron(first.numpy(), second.numpy()) @ np.eye(48)[order]
    np.testing.assert_allclose(dense("kronecker", 48).numpy(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_is_spread(kind):
    """One entry of n becomes entries of size 1 / sqrt(n), or near it: what rotations are for."""
    spike = torch.zeros(768, 1)
    spike[5] = 1.0
    spread = rotate_all(spike, rotation_of(kind, 768, 5, spike), dim=0)
    assert spread.abs().max() < 10 / 768**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    a, b = (dense(kind, 48, seed) for seed in (1, 2))
    assert torch.equal(a, dense(kind, 48, 1))
    assert (a - b).abs().max() > 0.1


def test_factors_too_large_to_pay_are_left_out():
    prime = 1031
    assert prime > LARGEST_RANDOM
    for kind in KINDS:
        factors = rotation_of(kind, 4 * prime, 5, torch.empty(0)).factors
        assert [size for size, factor in factors if factor is None] == [prime]
        assert any(factor is not None for _, factor in factors)


def test_random_orthogonal_matrices_have_no_preferred_direction():
    """Entries of Haar matrices have mean 0 and variance 1 / n; QR alone fixes signs."""
    size, count = 8, 2000
    entries = torch.stack([random_orthogonal(size, seed) for seed in range(count)])
    error = (entries.mean(0) * size**0.5).abs().max()
    assert error < 5 / count**0.5
    # The variance of a squared entry is about 2 / n^2.
    error = (entries.square().mean(0) * size - 1).abs().max()
    assert error < 5 * (2 / count) ** 0.5


@cases(
    {"conditioner": [*CONDITIONERS, *WITH_OUTLIERS], "dim": [-1, 0]},
    rotated={"quantizer": QUANTIZERS},
    ids=ids,
)
def test_decode_gives_what_a_call_gives(conditioner, dim, quantizer):
    """To the bit. Conditioners hand matrices to a quantizer, and ask nothing about it."""
    for shape in SHAPES:
        for x in (
            matrix(shape, 1e-3),
            matrix(shape).bfloat16(),
            matrix(shape).double(),
            torch.full(shape, -1.75),
            -torch.zeros(shape),
            matrix(shape).index_fill(0, torch.tensor([0]), torch.nan),
        ):
            encoded = conditioner.encode(x, quantizer, dim=dim, key=KEY)
            for dtype in DTYPES:
                expected = conditioner(x, quantizer, dim=dim, key=KEY, dtype=dtype)
                found = conditioner.decode(encoded, quantizer, dim=dim, shape=shape, dtype=dtype)
                assert expected.dtype is dtype
                assert expected.shape == shape
                assert_same_bits(found, expected)
                assert expected.isnan().any() == x.isnan().any()
                assert not quantizer.two_level or expected.isnan().all() == x.isnan().any()


@cases({"conditioner": CONDITIONERS, "dim": [-1, 0]}, rotated={"quantizer": QUANTIZERS}, ids=ids)
def test_parts_make_up_the_operand(conditioner, dim, quantizer):
    """What is measured is what was quantized."""
    for shape in SHAPES:
        x = matrix(shape)
        x_hat = conditioner(x, quantizer, dim=dim, key=KEY, dtype=torch.float32)
        *means, (_, before, after) = conditioner.parts(x, quantizer, dim=dim, key=KEY)
        if isinstance(conditioner, MeanRemoved):
            ((_, mean, mean_hat),) = means
            torch.testing.assert_close(mean, row_mean(x))
            if conditioner == MeanRemoved():
                torch.testing.assert_close(before + mean, x)
                torch.testing.assert_close(after + mean_hat, x_hat)
            else:
                rest = conditioner.inner.inverse(after, dim=dim)
                torch.testing.assert_close(rest + mean_hat, x_hat)
        else:
            torch.testing.assert_close(after.norm(), x_hat.norm(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("conditioner", [*CONDITIONERS, *WITH_OUTLIERS, RandomHadamard()], ids=ids)
def test_no_entries(conditioner):
    for shape, dim in itertools.product(((0, 48), (48, 0)), (-1, 0)):
        x = torch.zeros(shape)
        found = conditioner(x, Quantizer(), dim=dim, key=KEY, dtype=torch.bfloat16)
        assert found.shape == shape
        assert found.dtype is torch.bfloat16


@pytest.mark.parametrize("conditioner", CONDITIONERS, ids=ids)
class TestContents:
    def test_edges(self, conditioner):
        """Zeros, and what is not finite; exact where nothing is quantized."""
        for dim, shape in itertools.product((-1, 0), SHAPES):
            x = matrix(shape).double()
            found = conditioner(x, Exact(), dim=dim, key=KEY, dtype=torch.float64)
            # Of entries near 10, and 2e3 terms.
            torch.testing.assert_close(found, x, rtol=0, atol=1e-12)
        assert not conditioner(torch.zeros(37, 70), Quantizer(), dim=-1, key=KEY).any()
        for value in (torch.nan, torch.inf, -torch.inf):
            x = matrix((37, 70))
            x[3, 5] = value
            found = conditioner(x, Quantizer(), dim=-1, key=KEY)
            assert not found[3].isfinite().any()  # one tensor scale for all of it

    @pytest.mark.parametrize("dim", some_slow([-1, 0], [0]))
    def test_stochastic_rounding_is_unbiased(self, conditioner, dim):
        """The mean error of n draws along x and along random directions, within 5 sigma of zero.

        17 tests of two normal tails (5.7e-7 each) in all; the errors of nearest rounding are far
        beyond that.
        """
        x, quantizer, n = matrix((37, 70)), QUANTIZERS[1], 400
        g = torch.Generator().manual_seed(7)
        directions = torch.cat([x[None], torch.randn(16, 37, 70, generator=g)]).flatten(1).double()
        errors = torch.stack(
            [conditioner(x, quantizer, dim=dim, key=Key(seed)) - x for seed in range(n)]
        )
        along = errors.flatten(1).double() @ directions.T  # [n 17]
        sigma = along.std(0) / n**0.5
        assert (along.mean(0).abs() < 5 * sigma).all()
        nearest = conditioner(x, Quantizer(), dim=dim, key=KEY) - x
        assert ((directions @ nearest.flatten().double()).abs() > 5 * sigma).any()

    def test_copies_are_equal(self, conditioner):
        """Layers share what they encode of one tensor if their operands are equal."""
        again = pickle.loads(pickle.dumps(conditioner))
        assert again == conditioner
        assert hash(again) == hash(conditioner)


@pytest.mark.parametrize("conditioner", [FullHadamard(5), RandomKronecker(5)], ids=ids)
def test_rotations_cancel_in_the_contraction(conditioner):
    """x_hat @ w_hat^T is the product of the two quantized matrices, as hardware computes it."""
    x, w, quantizer = matrix((37, 70)), matrix((52, 70)), Quantizer()
    (x_part,), (w_part,) = (conditioner.parts(m, quantizer, dim=-1, key=KEY) for m in (x, w))
    expected = x_part.after @ w_part.after.T
    x_hat, w_hat = (conditioner(m, quantizer, dim=-1, key=KEY) for m in (x, w))
    bound = 4 * 70 * UNIT32 * x_hat.norm() * w_hat.norm()
    assert (x_hat @ w_hat.T - expected).norm() <= bound


class TestMean:
    def test_a_constant_costs_its_quantized_mean_only(self):
        """Rows that are all alike leave nothing: the operand is one quantized row."""
        row = matrix((1, 70))
        x_hat = MeanRemoved()(row.expand(64, 70), Quantizer(), dim=-1, key=KEY)
        assert torch.equal(x_hat, x_hat[:1].expand(64, 70))
        torch.testing.assert_close(x_hat[:1], Quantizer()(row), rtol=0.5, atol=0.05)

    def test_error_shrinks_where_the_mean_is_large(self):
        """Sixteen times a unit normal in the mean, equal in the columns of a block.

        Directly every element then has the scale of the mean. Apart, the rest has its own, and the
        mean costs one rounding that rows share.
        """
        g = torch.Generator().manual_seed(2)
        rest = torch.randn(256, 64, generator=g)
        x = rest + 16.0
        conditioner, quantizer = MeanRemoved(), Quantizer()
        centred = [
            values - values.mean(0)
            for values in (x, conditioner(x, quantizer, dim=-1, key=KEY), quantizer(x))
        ]
        apart, direct = ((c - centred[0]).norm() / centred[0].norm() for c in centred[1:])
        assert apart < 0.15  # NVFP4 on normal values: 20.4 dB, 0.096
        assert direct > 4 * apart

    def test_padding_takes_no_part(self):
        x = matrix((40, 70))
        mask = torch.arange(40) < 30
        poisoned = torch.where(mask[:, None], x, torch.full_like(x, float("nan")))
        torch.testing.assert_close(row_mean(poisoned, mask), x[:30].mean(0, keepdim=True))
        nobody = torch.zeros(40, dtype=torch.bool)
        torch.testing.assert_close(row_mean(x, nobody), x.mean(0, keepdim=True))


class TestBlocks:
    """Of the Hadamard rotation in blocks of 16."""

    def test_no_entries_are_padded_too(self):
        for turn in (rotate, unrotate):
            assert turn(torch.zeros(0, 20), dim=1, seed=0).shape == (0, 32)
            assert turn(torch.zeros(20, 0), dim=0, seed=0).shape == (32, 0)
            assert turn(torch.zeros(0, 20), dim=0, seed=0).shape == (0, 20)

    def test_a_dimension_that_is_not_there_is_refused(self):
        for dim in (2, 5, -3):
            with pytest.raises(IndexError, match=rf"dim={dim} is out .*of shape \(16, 16\)"):
                rotate(torch.zeros(16, 16), dim=dim, seed=0)
