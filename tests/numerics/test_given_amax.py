"""Tensor scales of an amax that is given: by definition, in every kernel, stored, and saturated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import fake_quantize as reference

from metis_hf.numerics import Quantizer, fake_quantize, kernels, quantize
from metis_hf.numerics.kernels import use_kernels
from numerics.cases import assert_same_bits
from numerics.helpers import seeded
from numerics.kernels.kernel_tools import needs_compiler

RULES = ["absmax", "four-over-six", "search", "unbiased"]
FACTORS = [0.05, 0.9, 1.0, 7.0]  # of the tensor's own largest magnitude


def matrix(rows=5, columns=70, seed=0):
    return torch.randn(rows, columns, generator=seeded(seed)) * torch.logspace(-3, 0, columns)


@pytest.mark.parametrize("rule", RULES)
def test_by_definition(rule):
    x = matrix()
    for factor, tile in itertools.product(FACTORS, ("row", "square")):
        amax = x.abs().amax() * factor
        options = {"scale_rule": rule, "tile": tile}
        with use_kernels("reference"):
            found = fake_quantize(x, **options, amax=amax)
        expected = reference(x.numpy(), **options, amax=amax.item()).values
        np.testing.assert_array_equal(found.numpy(), expected)


def test_its_own_amax_changes_nothing():
    x = matrix()
    for rule in RULES:
        own = fake_quantize(x, scale_rule=rule, amax=x.abs().amax())
        assert_same_bits(own, fake_quantize(x, scale_rule=rule))


@pytest.mark.parametrize("kernel", ["reference", pytest.param("compiled", marks=needs_compiler)])
@pytest.mark.parametrize("rule", ["absmax", "search"])
def test_in_every_kernel_packed_and_stored(rule, kernel):
    quantizer, x = Quantizer(scale_rule=rule), matrix(33, 160)
    for factor in FACTORS:
        amax = x.abs().amax() * factor
        with use_kernels("reference"):
            expected = quantizer(x, amax=amax)
        with use_kernels(kernel):
            assert_same_bits(quantizer(x, amax=amax), expected)
            packed = kernels.pack(x, quantizer, amax=amax)
            assert_same_bits(kernels.unpack(packed, quantizer, shape=(33, 160)), expected)
            assert_same_bits(quantize(x, scale_rule=rule, amax=amax).dequantize(), expected)
            values, scale = quantizer.unscaled(x, dtype=torch.bfloat16, amax=amax)
            assert_same_bits(values.float() * scale, expected)


@settings(max_examples=50)
@given(st.floats(1e-6, 1e6), st.integers(0, 2**31))
def test_saturates_where_the_largest_scale_is_too_small(amax, seed):
    """Under amax, codes times the largest block scale reach amax itself and no further."""
    x = matrix(seed=seed) * 100
    found = fake_quantize(x, amax=torch.tensor(amax))
    assert found.abs().max() <= amax * (1 + 2.0**-22)
    blocks = torch.nn.functional.pad(x.abs(), (0, 10)).view(5, 5, 16)
    top = blocks.amax(-1).repeat_interleave(16, 1)[:, :70]
    reached = found[(x.abs() == top) & (top > amax)].abs()
    torch.testing.assert_close(reached, torch.full_like(reached, amax))


def test_the_gradient_is_straight_through():
    x = matrix().requires_grad_()
    fake_quantize(x, amax=torch.tensor(0.1)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_it_may_be_on_another_device():
    """As `torch.tensor(1.0)` is for a tensor on a GPU; meta tensors show a move without one."""
    x = torch.zeros(4, 32, device="meta")
    _, scale = Quantizer().unscaled(x, amax=torch.tensor(1.0))
    assert scale.device == kernels.pack(x, Quantizer(), amax=torch.tensor(1.0)).global_scale.device
    assert scale.device == x.device
    stored = quantize(x, amax=torch.tensor(1.0))
    assert stored.global_scale.device == stored.codes.device == x.device


def test_a_nan_spoils_its_block_alone():
    x = matrix()
    x[2, 20] = torch.nan
    bad = fake_quantize(x, amax=torch.tensor(1.0)).isnan()
    assert bad[2, 16:32].all()
    assert bad.sum() == 16


@pytest.mark.parametrize(
    ("amax", "options", "error", "message"),
    [
        (1.0, {}, TypeError, r"amax=1.0 is not a tensor; pass torch.tensor\(1.0\)"),
        (
            torch.ones(3),
            {},
            ValueError,
            r"a 0-dim tensor.*has shape \(3,\) and dtype torch.float32",
        ),
        (torch.tensor(1), {}, ValueError, "of a float dtype.*dtype torch.int64"),
        (torch.ones(()), {"fmt": "mxfp4"}, ValueError, r"mxfp4, two_level=False.*leave amax out"),
        (torch.ones(()), {"two_level": False}, ValueError, "has none"),
        (torch.ones(()), {"outer_scale": "token"}, ValueError, 'outer_scale="token".*has none'),
    ],
)
def test_refusals(amax, options, error, message):
    for call in (fake_quantize, quantize):
        with pytest.raises(error, match=message):
            call(matrix(), **options, amax=amax)
