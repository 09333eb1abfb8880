"""Sums of rows with random signs in one launch: the rows and signs of torch's operations.

test_kernels_on_gpu.py runs `SumsCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics.kernels import use_kernels
from metis_hf.transforms.spectral import sum_rows
from numerics.helpers import seeded

# Rows and the number of sums asked for: one stretch more or fewer than a program reads at once, a
# last stretch with one row, and fewer columns than a program's.
SIZES = [(2, 1), (40, 3), (37, 9), (161, 10), (150, 10), (330, 10)]


class SumsCases:
    device: str
    kernels = "triton"

    def sums(self, x: Tensor, count: int, key: Key, mask: Tensor | None = None) -> Tensor:
        there = key._replace(data=None if key.data is None else key.data.to(self.device))
        with use_kernels(self.kernels):
            found = sum_rows(
                x.to(self.device), count, there, None if mask is None else mask.to(self.device)
            )
        return found.cpu()

    @pytest.mark.parametrize(("t", "count"), SIZES)
    def test_rows_and_signs(self, t, count) -> None:
        """Of an identity matrix they can be read off the sums."""
        x, mask = torch.eye(t), torch.arange(t) % 3 > 0
        for key in (Key(1), Key(2, torch.tensor(-77, dtype=torch.int32))):
            for rows in (None, mask, torch.zeros_like(mask)):
                with use_kernels("reference"):
                    wanted = sum_rows(x, count, key, rows)
                assert torch.equal(self.sums(x, count, key, rows), wanted)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_sums_are_those_in_fp64(self, dtype) -> None:
        """Of a whole matrix, of a transposed one, and of part of one."""
        x = torch.randn(300, 300, generator=seeded(0)).to(dtype)
        for form in (x, x[:137].T, x[:, 3:140]):
            with use_kernels("reference"):
                wanted = sum_rows(form.double(), 9, Key(3))
            found = self.sums(form, 9, Key(3))
            assert found.dtype is (torch.float32 if dtype is torch.float16 else dtype)
            eps = torch.finfo(found.dtype).eps
            torch.testing.assert_close(found.double(), wanted, rtol=eps, atol=1e-5)

    def test_sums_without_what_is_masked(self) -> None:
        x, mask = torch.randn(90, 20, generator=seeded(0)), torch.arange(90) % 4 != 1
        clean = torch.where(mask[:, None], x, 0.0)
        for value in (float("nan"), float("inf"), 1e30):
            x[~mask] = value
            assert torch.equal(self.sums(x, 9, Key(5), mask), self.sums(clean, 9, Key(5)))

    @pytest.mark.parametrize("masked", [False, True])
    def test_a_row_that_is_not_finite_is_in_one_sum(self, masked) -> None:
        """The first row too, which stands for places beyond the last."""
        x = torch.randn(161, 20, generator=seeded(0))
        mask = torch.arange(161) % 3 != 1 if masked else None
        for row in (0, 159):
            bad = x.clone()
            bad[row, 3] = float("nan")
            sums = self.sums(bad, 10, Key(5), mask)
            assert sums.isnan().sum(0).tolist() == [0] * 3 + [1] + [0] * 16

    def test_tensors_of_other_kinds_go_the_other_way(self) -> None:
        x = torch.randn(40, 6, generator=seeded(0))
        assert self.sums(x.double(), 4, Key(1)).dtype is torch.float64
        assert not self.sums(x.requires_grad_(), 4, Key(1)).requires_grad


class TestInInterpreter(SumsCases):
    device = "cpu"
