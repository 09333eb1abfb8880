"""Bytes moved to make a quantized operand, counted at the dispatcher, over those of a copy of it.

A copy reads the tensor once and writes it once. What is counted, and what is not, is said in
benchmarks/traffic.py.
"""

from __future__ import annotations

import pytest
import torch
import traffic
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import cpu_library
from metis_hf.operands import Operand
from metis_hf.operands.conditioners.spectral import Spectral

needs_compiler = pytest.mark.skipif(cpu_library.missing() is not None, reason="no C++ compiler")
DIRECT_BOUND = 2.0
# Projecting reads x once, the low-rank part is written once; for the amax and again for the codes x
# and the low-rank part are read, the result is written: (1 + 1 + 2 + 2 + 1) / 2 = 3.5 copies. The
# rest is for blocks' scales, sampled rows and thin factors.
SPLIT_BOUND = 4.0
SUMMED_BOUND = SPLIT_BOUND + 0.5  # sums of rows read x once more
SPLIT_ROWS = 8192
ROWS, COLUMNS = 2048, 1024


def tensor(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))


def moved(operand: Operand, kernels: str, rows: int = ROWS) -> float:
    x = tensor(rows)
    return traffic.multiple(lambda: operand(x, dim=-1, key=Key(3), dtype=torch.float32), x, kernels)


def test_an_operator_counts_what_it_reads_and_writes():
    x = tensor()
    assert traffic.multiple(lambda: x + x, x, "reference") == 1.5
    assert traffic.multiple(lambda: x.clone(), x, "reference") == 1
    assert traffic.multiple(lambda: x.T[:5], x, "reference") == 0
    rows = torch.arange(ROWS // 4)
    assert traffic.multiple(lambda: x[rows], x, "reference") == pytest.approx(0.25, rel=1e-2)
    assert traffic.multiple(lambda: x * x[:, :1].expand_as(x), x, "reference") == pytest.approx(
        1, rel=1e-3
    )


def test_large_gemms_count_as_flops():
    a, b, thin = torch.ones(64, 32), torch.ones(32, 48), torch.ones(32, 2)
    with traffic.counting(gemm_from=32) as count:
        a @ b
    assert (count.gemm_flops, count.bytes) == (2 * 64 * 32 * 48, 0)
    with traffic.counting(gemm_from=32) as count:
        a @ thin
    assert (count.gemm_flops, count.bytes) == (0, 4 * (64 * 32 + 32 * 2 + 64 * 2))


@needs_compiler
def test_one_level_is_read_once_and_written_once():
    assert moved(Operand(Quantizer(two_level=False)), "compiled") == pytest.approx(1, abs=0.01)


@needs_compiler
def test_a_direct_operand():
    over_copy = moved(Operand(Quantizer()), "compiled")
    assert 1.5 <= over_copy <= DIRECT_BOUND  # read for amax, read again, written
    stochastic = moved(Operand(Quantizer(rounding="stochastic")), "compiled")
    assert stochastic == pytest.approx(over_copy, rel=0.01)


@needs_compiler
@pytest.mark.parametrize(("summed", "bound"), [(False, SPLIT_BOUND), (True, SUMMED_BOUND)])
def test_an_operand_with_the_split(summed, bound):
    split = Spectral(rank=16, summed=summed)
    over_copy = moved(Operand(Quantizer(), split), "compiled", SPLIT_ROWS)
    assert bound - 0.5 <= over_copy <= bound


def test_the_reference_moves_many_times_as_much():
    assert moved(Operand(Quantizer()), "reference") > 3 * DIRECT_BOUND


def test_counting_changes_no_value():
    x, quantizer = tensor(64), Quantizer()
    plain = quantizer(x)
    with traffic.counting():
        counted = quantizer(x)
    assert torch.equal(plain, counted)
