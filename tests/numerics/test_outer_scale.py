"""One fp32 scale for each row: a row is quantized as if it were a tensor of its own."""

from __future__ import annotations

import pytest
import torch
from design import cases
from reference import fake_quantize as reference
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer, fake_quantize, quantize
from metis_hf.numerics.kernels import pack, unpack, use_kernels
from numerics.cases import assert_same_bits, fp32
from numerics.helpers import operators, seeded
from numerics.kernels.kernel_tools import needs_compiler

FORMATS = ["nvfp4", "nvint4", "if4", "mixfp4"]  # those with a second level


def matrix(rows: int = 21, columns: int = 70, seed: int = 0) -> Tensor:
    """Rows of sizes from 1e-6 to 1e6, one of zeros, one with an outlier."""
    x = torch.randn(rows, columns, generator=seeded(seed))
    x *= torch.logspace(-6, 6, rows)[:, None]
    x[3] = 0
    x[5, 7] *= 1e3
    return x


def row_by_row(x: Tensor, fmt: str, **options) -> Tensor:
    return torch.stack([fp32(reference(row.numpy(), fmt, **options).values) for row in x])


@cases(
    {"fmt": FORMATS},
    rotated={"scale_rounding": ["nearest", "up"], "columns": [70, 64, 9]},
)
def test_rows_are_the_references_tensors(fmt, scale_rounding, columns):
    x = matrix(columns=columns)
    options = {"scale_rounding": scale_rounding}
    wanted = row_by_row(x, fmt, **options)
    found = fake_quantize(x, fmt, outer_scale="token", **options)
    assert_same_bits(found, wanted)
    stored = quantize(x, fmt, outer_scale="token", **options)
    assert stored.global_scale.shape == (21, 1)
    assert_same_bits(stored.dequantize(), wanted)
    one = quantize(x, fmt, **options)
    assert stored.nbytes == one.nbytes + 4 * 20


@pytest.mark.parametrize("rule", ["four-over-six", "search", "unbiased"])
def test_rules_of_block_scales(rule):
    x = matrix()
    found = fake_quantize(x, outer_scale="token", scale_rule=rule)
    assert_same_bits(found, row_by_row(x, "nvfp4", scale_rule=rule))


def test_small_tokens_survive_beside_large_ones():
    """Under the tensor's scale a block of 2^-10 / 448 of the largest has a scale of zero."""
    x = matrix()
    together, apart = (fake_quantize(x, outer_scale=outer) for outer in ("tensor", "token"))
    lost = (together == 0).all(1)
    assert lost.sum() > 8
    error = (apart - x).norm(dim=1) / x.norm(dim=1).clamp(min=1e-30)
    assert error.max() < 0.13  # 20.4 dB is .095 for normal values
    assert not apart[lost & (x != 0).any(1)].eq(0).all(1).any()


def test_blocks_across_rows_share_the_tensors_scale():
    x = matrix()
    for dim in (0, -2):
        found = quantize(x, dim=dim, outer_scale="token")
        assert found.global_scale.shape == ()
        assert_same_bits(found.dequantize(), fake_quantize(x, dim=dim))


def test_what_is_not_finite_stays_in_its_row():
    x = matrix()
    x[2, 3], x[8, 1] = torch.nan, torch.inf
    found = fake_quantize(x, outer_scale="token")
    assert found.isnan().all(1).nonzero().flatten().tolist() == [2, 8]
    rest = [row for row in range(21) if row not in (2, 8)]
    assert_same_bits(found[rest], fake_quantize(x[rest], outer_scale="token"))


@pytest.mark.parametrize("shape", [(40,), (3, 4, 33), (1, 16)])
def test_rows_of_any_shape(shape):
    x = torch.randn(shape, generator=seeded(4))
    found = fake_quantize(x, outer_scale="token")
    wanted = row_by_row(x.reshape(-1, shape[-1]), "nvfp4").view(shape)
    assert_same_bits(found, wanted)
    values, scale = Quantizer(outer_scale="token").unscaled(x)
    assert scale.shape == (*shape[:-1], 1)
    assert_same_bits(values * scale, wanted)
    assert fake_quantize(x[:0], outer_scale="token").shape == x[:0].shape


KERNELS = ["reference", pytest.param("compiled", marks=needs_compiler)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "quantizer",
    [
        Quantizer(outer_scale="token", rounding="stochastic"),
        Quantizer(outer_scale="token", scale_rule="search"),
        Quantizer("if4", outer_scale="token"),
    ],
    ids=["stochastic", "search", "if4"],
)
def test_packed(quantizer, kernels):
    """Codes for the backward pass, with an odd number of blocks; the reference's bits."""
    key, shape = Key(3), (21, 70)
    x, minus = matrix(), torch.randn(shape, generator=seeded(8))
    with use_kernels("reference"):
        wanted = quantizer(x, key=key)
        around = quantizer(x, key=key, minus=minus, plus=minus)
        reference_scale = pack(x, quantizer, key=key).global_scale
    with use_kernels(kernels):
        assert_same_bits(quantizer(x, key=key), wanted)
        assert_same_bits(quantizer(x, key=key, minus=minus, plus=minus), around)
        packed = pack(x, quantizer, key=key)
        assert_same_bits(packed.global_scale, reference_scale)
        assert packed.global_scale.shape == (21, 1)
        assert_same_bits(unpack(packed, quantizer, shape=shape), wanted)
        values, scale = quantizer.unscaled(x, key=key, dtype=torch.bfloat16)
        assert_same_bits(scale, reference_scale)
        options = {"shape": shape, "dtype": torch.bfloat16, "scaled": False}
        assert_same_bits(unpack(packed, quantizer, **options), values)
        taken = pack(x, quantizer, key=key, minus=minus)
        assert_same_bits(unpack(taken, quantizer, shape=shape, plus=minus), around)


@pytest.mark.parametrize("rule", ["absmax", "eden"])
def test_inside_a_compiled_function(rule):
    x, quantizer = matrix(), Quantizer(outer_scale="token", scale_rule=rule)
    with use_kernels("reference"):
        wanted = quantizer(x, key=5)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda t: quantizer(t, key=5), backend=counter, fullgraph=True)
    with use_kernels(None):
        assert_same_bits(compiled(x), wanted)
    assert operators(counter) == ["quantize"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"fmt": "mxfp4"}, ["e8m0 block scales mxfp4 has none", 'outer_scale="tensor"']),
            ({"fmt": "ufp4"}, ["fp32 block scales ufp4 has none"]),
            ({"two_level": False}, ["two_level=False nvfp4 has none"]),
            ({"tile": "square"}, ['tile="square" span several', 'use tile="row"']),
            ({"outer_scale": "row"}, ["outer_scale='row' is unknown", "'tensor', 'token'"]),
        ],
    )
    def test_what_does_not_go_together(self, options, words):
        for function in (fake_quantize, quantize):
            with pytest.raises(ValueError, match="outer_scale") as error:
                function(torch.zeros(16, 16), **{"outer_scale": "token", **options})
            assert all(word in str(error.value) for word in words), error.value
