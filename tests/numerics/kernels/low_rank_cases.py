"""The rest of a matrix beside a low-rank part, which kernels multiply out for each tile.

test_kernels_on_gpu.py runs `LowRankCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import fused, pack, unpack, use_kernels
from metis_hf.numerics.kernels.layout import Low
from metis_hf.numerics.kernels.scratch import WORDS, Scratch
from metis_hf.operands.conditioners.spectral import Spectral
from numerics.cases import assert_same_bits
from numerics.helpers import seeded

SEARCH = Quantizer(scale_rule="search")
GRADIENT = Quantizer(rounding="stochastic", scale_rounding="up")
# Rows, columns, rank, dim: one row; whole tiles and parts of them, along rows and columns; fewer
# rows than directions; and the widest factors.
CASES = [(1, 32, 1, -1), (70, 96, 12, -1), (33, 128, 16, 0), (5, 48, 16, 0), (64, 64, 128, -1)]

# Rows, columns, rank, dim of a split: whole, along tokens, a batch that is shorter than the rank,
# of one row, of a width that kernels do not take, and of one below the rank.
SPLITS = [(70, 96, 12, -1), (64, 64, 16, 0), (9, 64, 48, -1), (1, 32, 4, -1), (33, 72, 12, -1)]
SPLITS.append((40, 32, 48, -1))


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = seeded(rows + columns + seed)
    low = torch.randn(rows, 2, generator=g) @ torch.randn(2, columns, generator=g) * 8
    return (low + torch.randn(rows, columns, generator=g)).to(dtype)


class LowRankCases:
    device: str

    def factors(self, x: Tensor, rank: int, quantizer: Quantizer, dim: int) -> tuple[Low, Tensor]:
        """Packed factors, and their product in fp64."""
        (rows, columns), g = x.shape, seeded(rank)
        left, right = torch.randn(rows, rank, generator=g), torch.randn(rank, columns, generator=g)
        lengths = torch.exp2(torch.linspace(3, -9, rank))
        with use_kernels("reference"):
            codes = [pack(each, quantizer, dim=dim, key=Key(7)) for each in (left, right)]
            values = [
                unpack(each, quantizer, dim=dim, shape=tuple(like.shape)).double()
                for each, like in zip(codes, (left, right))
            ]
        dense = (values[0] * lengths.double()) @ values[1]
        there = [type(c)(*(t if t is None else t.to(self.device) for t in c)) for c in codes]
        return Low(there[0], lengths.to(self.device), there[1]), dense

    def fused(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """low + Q(x - low), and low in fp64."""
        low, dense = self.factors(x, 12, SEARCH, -1)
        given = {"dim": -1, "key": None, "dtype": dtype, "scaled": True, "low": low}
        with use_kernels("triton"):
            kernels = fused.taking_low(low.lengths, SEARCH, dim=-1, shape=tuple(x.shape))
            return kernels.fake_quantize(x, SEARCH, **given)[0].cpu(), dense

    @pytest.mark.parametrize("quantizer", [SEARCH, GRADIENT, Quantizer(two_level=False)])
    @pytest.mark.parametrize(("rows", "columns", "rank", "dim"), CASES)
    def test_as_with_a_matrix_that_is_taken_off(self, rows, columns, rank, dim, quantizer) -> None:
        """But for the last bits of sums, by which few elements get another code."""
        x = matrix(rows, columns)
        low, dense = self.factors(x, rank, quantizer, dim)
        options = {"dim": dim, "key": Key(3)}
        there = x.to(self.device), quantizer
        given = {"dtype": torch.float32, "scaled": True, "low": low}
        shape = (rows, columns)
        with use_kernels("triton"):
            kernels = fused.taking_low(low.lengths, quantizer, dim=dim, shape=shape)
            assert kernels is not None
            found, _ = kernels.fake_quantize(*there, **options, **given)
            packed, values = kernels.pack_with_values(*there, **options, **given)
            unpacked = kernels.unpack(packed, quantizer, dim=dim, shape=shape, **given)
            given["dtype"] = None
            codes, none = kernels.pack_with_values(*there, **options, **given)
        assert none is None
        assert all(map(torch.equal, packed[:2], codes[:2]))
        for each in (values, unpacked):  # half way and on is the whole way
            assert each.shape == x.shape
            assert_same_bits(each.cpu(), found.cpu())
        with use_kernels("reference"):
            plain = dense.float()
            wanted = quantizer(x, **options, minus=plain, plus=plain)
            residual = unpack(packed_on_cpu(packed), quantizer, dim=dim, shape=shape).double()
        torch.testing.assert_close(found.cpu().double(), dense + residual, rtol=1e-6, atol=2e-4)
        same = (found.cpu() - wanted).abs() <= 2e-4
        assert same.double().mean() >= 0.99

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_of_any_dtype_and_strides(self, dtype) -> None:
        x = matrix(40, 64, dtype)
        results = [
            self.fused(form, dtype)[0]
            for there in [x.to(self.device)]
            for form in (there, there.T.contiguous().T, torch.cat([there, there], 1)[:, :64])
        ]
        assert results[0].dtype is dtype
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_broken_entries_show(self, value) -> None:
        x = matrix(40, 64)
        x[3, 5] = value
        found, dense = self.fused(x.to(self.device), torch.float32)
        with use_kernels("reference"):
            wanted = SEARCH(x, minus=dense.float(), plus=dense.float())
        assert torch.equal(found.isnan(), wanted.isnan())

    @pytest.mark.parametrize(("rows", "columns", "rank", "dim"), SPLITS)
    def test_a_split_of_a_matrix(self, rows, columns, rank, dim) -> None:
        """Whole, half way and on, and with scratch memory: one result.

        In bf16 as a GEMM takes it; factors are the packed ones.
        """
        split, x = Spectral(rank, rows=16, summed=True), matrix(rows, columns, torch.bfloat16)
        options = {"dim": dim, "dtype": torch.bfloat16}
        there, shape = x.to(self.device), (rows, columns)
        words = torch.zeros(WORDS, dtype=torch.int32, device=self.device)
        with use_kernels("triton"):
            found, low = split.with_factors(there, SEARCH, key=Key(3), **options)
            encoded = split.encode(there, SEARCH, key=Key(3, scratch=Scratch(words)), **options)
            decoded = split.decode(encoded.stored(), SEARCH, shape=shape, **options)
            again, packed = split.decode_with_factors(encoded, SEARCH, shape=shape, **options)
        for each in (decoded, again, *([] if encoded.values is None else [encoded.values])):
            assert_same_bits(each.cpu(), found.cpu())
        assert low is not None
        assert packed is not None
        for one, other in zip(low, packed):
            assert_same_bits(one.to(torch.bfloat16).cpu(), other.to(torch.bfloat16).cpu())

    @pytest.mark.parametrize(("rows", "columns", "rank", "dim"), SPLITS)
    def test_errors_are_as_large_as_without_kernels(self, rows, columns, rank, dim) -> None:
        """On average over matrices where there is a single row, in which one rounding counts."""
        split, squares = Spectral(rank, rows=16, summed=True), {"triton": 0.0, "reference": 0.0}
        for seed in range(8 if rows == 1 else 1):
            x = matrix(rows, columns, torch.bfloat16, seed)
            options = {"dim": dim, "dtype": torch.bfloat16, "key": Key(3)}
            for kernels in squares:
                with use_kernels(kernels):
                    found, _ = split.with_factors(x.to(self.device), SEARCH, **options)
                squares[kernels] += (found.cpu().float() - x.float()).square().sum().item()
        assert squares["triton"] == pytest.approx(squares["reference"], rel=0.1)

    def test_what_kernels_do_not_have(self) -> None:
        """Odd numbers of blocks, long or no factors, other formats and tiles."""
        lengths = torch.ones(16, device=self.device)
        square, token = Quantizer(tile="square"), Quantizer(outer_scale="token")
        with use_kernels("triton"):
            for shape, dim in (((64, 48), -1), ((64, 40), 0), ((0, 64), -1)):
                assert not fused.taking_low(lengths, SEARCH, dim=dim, shape=shape)
            for other in (lengths[:0], lengths.repeat(9), lengths.double()):
                assert not fused.taking_low(other, SEARCH, dim=-1, shape=(64, 64))
            assert not fused.taking_low(lengths[:12], SEARCH, dim=0, shape=(64, 64))
            for quantizer in (Quantizer("mxfp4"), square, token):
                assert not fused.taking_low(lengths, quantizer, dim=-1, shape=(64, 64))


def packed_on_cpu(packed):
    return type(packed)(*(None if part is None else part.cpu() for part in packed))


class TestInInterpreter(LowRankCases):
    device = "cpu"
