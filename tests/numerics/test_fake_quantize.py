"""fake_quantize: zeros, flushed numbers, bf16, and the straight-through gradient.

Its values are held to the slow reference in test_formats.py.
"""

from __future__ import annotations

import pytest
import torch
from design import cases

from metis_hf.numerics import SCALE_FP32, Quantizer, fake_quantize, quantize
from numerics.cases import FORMAT_NAMES, MIXED_FORMATS, OPTIONS, assert_same_bits
from numerics.helpers import DTYPES, normal, seeded

ROUNDINGS = ["nearest", "stochastic"]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_zero_and_empty_tensors_stay_what_they_are(rounding) -> None:
    for options in OPTIONS:
        for x in (torch.zeros(3, 40), torch.empty(0, 16, dtype=torch.bfloat16)):
            assert_same_bits(fake_quantize(x, rounding=rounding, **options), x)
    assert quantize(torch.zeros(2, 32)).global_scale == 1


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor flushes none")
def test_zeros_stay_zero_where_subnormal_numbers_are_flushed() -> None:
    """The scale of a block of zeros may be subnormal."""
    x = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    x[:32] = 0
    wanted = [fake_quantize(x, **options) for options in OPTIONS]
    torch.set_flush_denormal(True)
    try:
        flushed = [fake_quantize(x, **options) for options in OPTIONS]
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(flushed, wanted, strict=True):
        assert_same_bits(one, other)


def test_bf16_holds_values_without_outer_scale() -> None:
    """Exactly, but under fp32 block scales and in integers with a step of 6/7."""
    x = normal(64, 64)
    for fmt in FORMAT_NAMES + MIXED_FORMATS:
        quantizer = Quantizer(fmt)
        values, _ = quantizer.unscaled(x)
        in_bf16, _ = quantizer.unscaled(x, dtype=torch.bfloat16)
        rounds = quantizer.fmt.scale == SCALE_FP32 or fmt == "if4"
        assert torch.equal(in_bf16.float(), values) is not rounds, fmt


@cases({"dtype": DTYPES}, rotated={"rounding": ROUNDINGS, "tile": ["row", "square"]})
def test_gradient_is_straight_through(dtype, rounding, tile) -> None:
    """Of clipped elements and of blocks of zeros too."""
    x = normal(5, 33, seed=32, dtype=dtype)
    x[1], x[2, :16] = 0, 1e4
    x.requires_grad_()
    upstream = normal(5, 33, seed=33, dtype=dtype)
    options = {"rounding": rounding, "tile": tile, "two_level": False}
    fake_quantize(x, generator=seeded(5), **options).backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_without_grad_there_is_no_graph() -> None:
    assert not fake_quantize(normal(2, 16)).requires_grad
    x = normal(2, 16).requires_grad_()
    with torch.no_grad():
        assert not fake_quantize(x).requires_grad
