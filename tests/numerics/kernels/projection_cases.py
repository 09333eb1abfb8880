"""The projection on a thin basis in two launches.

test_kernels_on_gpu.py runs `ProjectionCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metis_hf.numerics.kernels import use_kernels
from metis_hf.transforms.products import project
from numerics.helpers import seeded

# Rows, columns, directions: fewer and more than a program's, and no multiples of anything.
SIZES = [(1, 1, 1), (3, 40, 5), (130, 100, 16), (200, 33, 21), (128, 70, 1), (65, 64, 128)]


def coordinates(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unit columns and lengths, in fp64."""
    p = x.double() @ v.double()
    length = p.norm(dim=0)
    return p / torch.where(length == 0, 1.0, length), length


def matrices(rows: int, columns: int, width: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, columns, generator=seeded(0)).bfloat16()
    return x, torch.randn(columns, width, generator=seeded(1))


class ProjectionCases:
    device: str

    def project(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with use_kernels("triton"):
            a, lengths = project(x.to(self.device), v.to(self.device))
        assert a.dtype is lengths.dtype is torch.float32
        return a.cpu(), lengths.cpu()

    @pytest.mark.parametrize(("rows", "columns", "width"), SIZES)
    def test_unit_columns_and_lengths(self, rows, columns, width) -> None:
        """Of matrices, of transposed ones, and of parts: as good as products in fp32."""
        x, v = matrices(rows, columns, width)
        found, wanted = self.project(x, v), coordinates(x, v)
        bound = 1e-6 * columns**0.5
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound)
        for form in (x.T.contiguous().T, torch.cat([x, x], 1)[:, :columns]):
            for basis in (v.T.contiguous().T, torch.cat([v, v], 1)[:, :width]):
                assert all(map(torch.equal, found, self.project(form, basis)))

    @pytest.mark.parametrize("size", [1e-36, 1e-30, 1e30, 1e35])
    def test_squares_do_not_leave_their_range(self, size) -> None:
        """In one block of rows, too, beside a far larger one."""
        x, v = matrices(300, 20, 8)
        x[:128] *= 1e-6
        v = v.bfloat16().float()  # whose parts beyond the first are 0, however small
        x = (x * size).bfloat16()
        found, wanted = self.project(x, v), coordinates(x, v)
        torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found[1].double() / size, wanted[1] / size, rtol=1e-5, atol=0)

    def test_zeros(self) -> None:
        """A column of zeros stays one, of length 0; a block of them changes no other."""
        x, v = matrices(300, 20, 8)
        v[:, 3] = 0
        x[64:192] = 0
        a, lengths = self.project(x, v)
        assert lengths[3] == 0
        assert not a[:, 3].any()
        torch.testing.assert_close(a.double(), coordinates(x, v)[0], rtol=5e-6, atol=5e-6)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_a_broken_entry_shows_in_its_column(self, value) -> None:
        x, v = matrices(300, 20, 8)
        v[7, 2] = value
        a, lengths = self.project(x, v)
        assert lengths.isfinite().tolist() == [place != 2 for place in range(8)]
        assert a.isnan().any(0).tolist() == [place == 2 for place in range(8)]
        assert a[:, 2].isnan().all()


class TestInInterpreter(ProjectionCases):
    device = "cpu"
