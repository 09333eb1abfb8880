"""occ (clamping, sparse rest, gradient estimator) and hot-channel against plain references."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from layers.layer_tools import layer_of
from numerics.helpers import gaussian
from reference import fake_quantize

from metis_hf import MetisConfig
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.operands import IDENTITY
from metis_hf.operands.conditioners.clamped import Clamped, thresholds
from metis_hf.operands.conditioners.gradient_estimator import DifferentiableEstimator
from metis_hf.operands.conditioners.hot_channels import HotChannels
from metis_hf.schemes import Role, build_scheme

NEAREST = Quantizer()
KEY = Key(0, torch.tensor(0, dtype=torch.int32))
BIN = 1 / 128  # width of a bin of the histogram, of its values, at most


def heavy(rows, columns):
    """With a few channels thirty times as large as the others."""
    return gaussian(rows, columns) * torch.where(torch.arange(columns) % 17 == 3, 30.0, 1.0)


class TestClamped:
    TENSORS = (
        gaussian(37, 70),
        heavy(128, 170),
        -gaussian(64, 64).abs() - 1,
        gaussian(40, 50).exp(),
        gaussian(64, 64) * 1e-38,
        torch.zeros(40, 40),
        gaussian(50, 60).to(torch.bfloat16).float(),
    )

    @pytest.mark.parametrize("x", TENSORS, ids=range(len(TENSORS)))
    def test_thresholds_are_order_statistics(self, x):
        ordered = x.flatten().sort().values.tolist()
        for count in (0, 1, 10, 200):
            low, high = (t.item() for t in thresholds(x, count))
            assert sum(v > high for v in ordered) <= count
            assert sum(v < low for v in ordered) <= count
            tiny = 2.0**-126
            for threshold, exact in ((high, ordered[-1 - count]), (low, ordered[count])):
                assert abs(threshold - exact) <= BIN * abs(exact) + tiny

    @pytest.mark.parametrize(("shape", "dim"), [((37, 70), -1), ((130, 300), 0)], ids=str)
    def test_against_a_plain_reference(self, shape, dim):
        x = heavy(*shape)
        low, high = (t.item() for t in thresholds(x, int(0.01 * x.numel() + 1e-6)))
        clamped = np.clip(x.numpy(), np.float32(low), np.float32(high))
        rest = torch.from_numpy(x.numpy() - clamped).to(torch.bfloat16).float().numpy()
        expected = fake_quantize(clamped, dim=dim).values + rest
        found = Clamped()(x, NEAREST, dim=dim, key=KEY)
        np.testing.assert_array_equal(found.numpy(), expected)
        assert 0.005 < np.count_nonzero(rest) / x.numel() <= 0.02

    def test_the_sparse_part_is_small_and_complete(self):
        x = heavy(256, 512)
        encoded = Clamped().encode(x, NEAREST, dim=-1, key=KEY)
        values, columns, row_ends = encoded.tensors[3:]
        assert values.shape == columns.shape == (2 * int(0.01 * x.numel()),)
        assert (values.dtype, columns.dtype, row_ends.dtype) == (
            torch.bfloat16, torch.int16, torch.int32
        )  # fmt: skip
        low, high = thresholds(x, int(0.01 * x.numel()))
        outside = (x > high) | (x < low)
        assert torch.equal(row_ends, outside.sum(1).cumsum(0).int())
        assert torch.equal(columns[: row_ends[-1]].long(), outside.nonzero()[:, 1])
        assert not values[row_ends[-1] :].any()

    def test_wide_matrices(self):
        """Columns beyond 16 bits."""
        x = gaussian(3, 40000)
        encoded = Clamped().encode(x, NEAREST, dim=-1, key=KEY)
        assert encoded.tensors[4].dtype is torch.int32
        decoded = Clamped().decode(encoded, NEAREST, dim=-1, shape=x.shape)
        assert torch.equal(decoded, Clamped()(x, NEAREST, dim=-1, key=KEY))

    def test_infinities_stay(self):
        x = gaussian(64, 64)
        x[3, 5], x[7, 9] = torch.inf, -torch.inf
        found = Clamped()(x, NEAREST, dim=-1, key=KEY)
        assert found[3, 5] == torch.inf
        assert found[7, 9] == -torch.inf
        assert found.isfinite().sum() == x.numel() - 2


class TestHotChannels:
    @pytest.mark.parametrize(
        ("shape", "dim", "tile"),
        [((37, 70), 0, "row"), ((130, 300), -1, "row"), ((37, 70), -1, "square")],
        ids=str,
    )
    def test_against_a_plain_reference(self, shape, dim, tile):
        x = heavy(*shape)
        first = fake_quantize(x.numpy(), dim=dim, tile=tile).values
        error = x.numpy() - first
        score = np.abs(error.astype(np.float64)).mean(0 if dim == -1 else 1)
        count = {37: 16, 70: 16, 130: 16, 300: 32}[shape[dim]]  # 1/16, in whole blocks
        hot = np.sort(np.argsort(-score, kind="stable")[:count])
        residual = np.take(error, hot, axis=dim)
        patch = fake_quantize(residual, dim=dim, tile=tile).values
        expected = first.copy()
        where = (slice(None), hot) if dim == -1 else (hot, slice(None))
        expected[where] = first[where] + patch
        found = HotChannels()(x, Quantizer(tile=tile), dim=dim, key=KEY)
        np.testing.assert_array_equal(found.numpy(), expected)


class TestGradientEstimator:
    CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def step(self, y: np.ndarray) -> np.ndarray:
        """Equation 7 in every interval between two codes, k = 5, odd in y; float64."""
        magnitude = np.abs(y)
        place = np.clip(np.searchsorted(self.CODES, magnitude), 1, 7)
        low, delta = self.CODES[place - 1], np.diff(self.CODES)[place - 1]
        z = 2 * (magnitude - low) / delta - 1
        return np.sign(y) * (low + delta / 2 * (1 + np.sign(z) * np.abs(z) ** 0.2))

    def test_derivative_of_the_step_function(self):
        rng = np.random.default_rng(0)
        y, h = rng.uniform(-6, 6, 4000), 1e-6
        distance = np.abs(np.abs(y)[:, None] - self.CODES).min(1)
        y = y[distance > 1e-3]  # between codes; the slope jumps at them
        slope = (self.step(y + h) - self.step(y - h)) / (2 * h)
        found = DifferentiableEstimator().derivative(torch.from_numpy(y).float(), NEAREST)
        np.testing.assert_allclose(found.numpy(), np.minimum(slope, 3), rtol=1e-3)

    def test_special_places(self):
        y = torch.tensor([0.0, 0.5, 6.0, 7.5, -7.5, 0.25, -5.0, torch.nan])
        found = DifferentiableEstimator().derivative(y, NEAREST)
        torch.testing.assert_close(found[:7], torch.tensor([0.2] * 5 + [3.0] * 2))
        assert found[7].isnan()

    @pytest.mark.parametrize(
        ("shape", "mode"), [((40, 48, 32), "shared"), ((37, 70, 52), "contraction")], ids=str
    )
    def test_layer(self, shape, mode):
        """The weight's gradient is the straight-through one times the slope; nothing else moves."""
        t, i, o = shape
        torch.manual_seed(0)
        _, layer = layer_of("occ", mode, i=i, o=o)
        x, dy = heavy(t, i), gaussian(t, o, seed=1)
        results = []
        for conditioner in (layer.scheme.fprop_weight.conditioner, IDENTITY):
            weight = replace(layer.scheme.fprop_weight, conditioner=conditioner)
            layer.scheme = replace(layer.scheme, fprop_weight=weight)
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            y.backward(dy)
            results.append((y.detach(), leaf.grad, layer.bias.grad, layer.weight.grad))
        *found, dw = results[0]
        *plain, straight = results[1]
        assert all(torch.equal(a, b) for a, b in zip(found, plain))
        w, quantizer = layer.weight.detach(), layer.scheme.fprop_weight.quantizer
        quantized = fake_quantize(w.numpy(), tile=quantizer.tile.value)
        slope = DifferentiableEstimator().derivative(torch.from_numpy(quantized.scaled), quantizer)
        assert slope.std() > 0.3
        torch.testing.assert_close(dw, straight * slope)

    def test_a_weight_of_zeros(self):
        _, layer = layer_of("occ")
        layer.weight.data.zero_()
        layer(gaussian(40, 48)).sum().backward()
        assert layer.weight.grad.isfinite().all()
        assert layer.weight.grad.any()


@pytest.mark.parametrize("mode", ["shared", "contraction"])
@pytest.mark.parametrize("name", ["halo", "quarot", "quip"])
def test_rotations_stay_where_they_are_without_a_forward_pass(name, mode):
    """Copies that it shared get blocks along the other dimension; features stay what is rotated."""
    dims = {Role.FPROP_INPUT: 1, Role.FPROP_WEIGHT: 1, Role.DGRAD_WEIGHT: 0, Role.WGRAD_INPUT: 0}

    def axis(scheme, role):
        used, operand = scheme.resolve(role)
        return (dims[used] + operand.conditioner.across) % 2

    scheme = build_scheme(MetisConfig(scheme=name, operand_mode=mode), 64, 32)
    backward = scheme.in_high_precision(["forward"])
    for role in (Role.DGRAD_WEIGHT, Role.WGRAD_INPUT):
        assert axis(backward, role) == axis(scheme, role)
        assert not backward.reuses(role)
