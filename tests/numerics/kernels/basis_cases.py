"""Orthonormal bases by kernels: of any rows, and the finder that they are made for.

test_kernels_on_gpu.py runs `BasisCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics.kernels import use_kernels
from metis_hf.transforms.spectral import dominant_basis
from numerics.helpers import gaussian

ORTHONORMAL = 5e-6
# Rows and columns: one, as many of both, more columns than a program reads at once, the most rows
# that one program holds and one more, which torch's operations take.
SIZES = [(1, 1), (3, 1100), (17, 17), (40, 64), (128, 130), (129, 140)]


class BasisCases:
    device: str
    kernels = "triton"

    def assert_orthonormal(self, basis: Tensor) -> None:
        gram = basis.double() @ basis.double().T
        eye = torch.eye(len(basis), dtype=torch.float64)
        torch.testing.assert_close(gram, eye, rtol=0, atol=ORTHONORMAL)

    def run(self, function, *tensors: Tensor | None) -> Tensor:
        there = [None if t is None else t.to(self.device) for t in tensors]
        with use_kernels(self.kernels):
            return function(*there).cpu()

    @pytest.mark.parametrize(("rows", "columns"), SIZES)
    def test_bases_of_any_size(self, rows, columns) -> None:
        """From a sketch, and from a basis of the step before."""
        sample = gaussian(2 * rows, columns) * 0.95 ** torch.arange(columns)
        sample[:rows] += 3 * torch.eye(rows, columns)
        start = torch.linalg.qr(gaussian(columns, rows, seed=1)).Q
        for options in ({"n_iter": 0}, {"n_iter": 2}, {"n_iter": 1, "start": start}):
            start_there = {k: v.to(self.device) for k, v in options.items() if k == "start"}
            with use_kernels("reference"):
                wanted = dominant_basis(sample, rows, key=Key(3), **options)
            there = {"rank": rows, "key": Key(3)} | options | start_there
            found = self.run(partial(dominant_basis, **there), sample)
            self.assert_orthonormal(found.T)
            # Rows are those by Gram and Schmidt, and so each is near its own.
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("products", [0, 2])
    def test_the_finder_gives_what_torch_gives(self, products, dtype) -> None:
        """From as many rows as directions too; the scale of the sample does not matter."""
        values = 0.8 ** torch.arange(70)
        for rows in (300, 9):
            sample = (gaussian(rows, 70) * values).to(dtype)
            options = {"n_iter": products, "key": Key(3)}
            with use_kernels("reference"):
                wanted = dominant_basis(sample, 9, **options)
            for scale in (1.0, 2.0**-8) if dtype is torch.float16 else (1.0, 2.0**100, 2.0**-100):
                found = self.run(partial(dominant_basis, rank=9, **options), sample * scale)
                assert found.dtype is torch.float32
                torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
                self.assert_orthonormal(found.T)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_entries_that_are_not_finite_count_as_zero(self, bad) -> None:
        sample = gaussian(100, 90).bfloat16()
        sample[5, 3:9] = bad
        zeroed = torch.where(sample.isfinite(), sample, 0)
        found, wanted = (self.run(lambda x: dominant_basis(x, 8), x) for x in (sample, zeroed))
        assert torch.equal(found, wanted)
        self.assert_orthonormal(found.T)

    @pytest.mark.parametrize("sample", [torch.zeros(40, 30), torch.ones(40, 30), torch.eye(40, 30)])
    def test_directions_that_a_sample_lacks(self, sample) -> None:
        for products in (0, 3):
            basis = self.run(lambda x, p=products: dominant_basis(x, 8, n_iter=p), sample)
            self.assert_orthonormal(basis.T)

    def test_what_a_sample_has_is_kept_beside_them(self) -> None:
        """Rows of zeros and equal ones make a sample of rank 6, asked for 12 directions."""
        sample = gaussian(6, 50).repeat(8, 1)
        sample[3::7] = 0
        start = torch.linalg.qr(gaussian(50, 12, seed=1)).Q
        start[:, 4] = 0
        for options in ({}, {"n_iter": 1, "start": start.to(self.device)}):
            find = partial(dominant_basis, rank=12, key=Key(3), **options)
            basis = self.run(find, sample)
            self.assert_orthonormal(basis.T)
            assert (sample - sample @ basis @ basis.T).norm() <= 1e-4 * sample.norm()

    def test_equal_calls_give_equal_bits(self) -> None:
        sample = gaussian(300, 70)
        first, second = (self.run(lambda x: dominant_basis(x, 20), sample) for _ in range(2))
        assert torch.equal(first, second)


class TestInInterpreter(BasisCases):
    device = "cpu"
