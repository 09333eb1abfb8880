"""The projection on a thin basis in three launches: its pieces, and what is around the GEMM.

test_kernels_on_gpu.py runs `ProjectionCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numerics.cases import assert_same_bits
from numerics.helpers import seeded

# Rows and columns: fewer and more than a program's, and no multiples of anything.
SIZES = [(1, 1), (3, 5), (130, 16), (300, 21), (128, 1)]
PARTS = 3


def coordinates(products: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Unit columns and lengths, in fp64."""
    p = products.double().view(len(products), PARTS, -1)[:, :, :width].sum(1)
    length = p.norm(dim=0)
    return p / torch.where(length == 0, 1.0, length), length


class ProjectionCases:
    device: str

    @pytest.mark.parametrize("columns", [1, 40, 300])
    @pytest.mark.parametrize(("width", "rows"), [(1, 8), (5, 8), (8, 8), (17, 24)])
    def test_parts_add_up_to_the_bit(self, columns, width, rows) -> None:
        """Of a matrix, of a transposed one, and of part of one."""
        from metis_hf.numerics.kernels.triton_projection import bf16_parts

        wide = torch.randn(columns + 1, 2 * width, generator=seeded(0))
        wide *= torch.exp2(torch.linspace(-60, 60, columns + 1))[:, None]
        for v in (wide[1:, ::2].contiguous(), wide[1:, ::2], wide.T.contiguous().T[:-1, :width]):
            parts = bf16_parts(v.to(self.device), PARTS, rows).cpu()
            assert parts.dtype is torch.bfloat16
            assert parts.shape == (PARTS, rows, columns)
            assert torch.equal(parts.double().sum(0)[:width], v.T.double())
            assert not parts[:, width:].any()
            # The first is the nearest number in bf16, the next that of what is left, and so on.
            assert_same_bits(parts[0, :width], v.T.to(torch.bfloat16))

    def unit_columns(self, products: Tensor, width: int) -> tuple[Tensor, Tensor]:
        from metis_hf.numerics.kernels.triton_projection import unit_columns

        a, lengths = unit_columns(products.to(self.device), PARTS, width)
        assert a.dtype is lengths.dtype is torch.float32
        return a.cpu(), lengths.cpu()

    @pytest.mark.parametrize(("rows", "width"), SIZES)
    def test_unit_columns(self, rows, width) -> None:
        padded = -(-width // 8) * 8
        products = torch.randn(rows, PARTS * padded, generator=seeded(0))
        products *= torch.tensor([1.0, 2.0**-8, 2.0**-16]).repeat_interleave(padded)
        products.view(rows, PARTS, padded)[:, :, width:] = torch.nan  # padding is not read
        found, wanted = self.unit_columns(products, width), coordinates(products, width)
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-7)
        again = self.unit_columns(products, width)
        assert all(map(torch.equal, found, again))

    @pytest.mark.parametrize("size", [1e-36, 1e-30, 1e30, 1e36])
    def test_squares_do_not_leave_their_range(self, size) -> None:
        """In one block of rows, too, beside a far larger one."""
        products = torch.randn(300, PARTS * 8, generator=seeded(0)).clamp(-3, 3)
        products[:128] *= 1e-6
        found, wanted = self.unit_columns(products * size, 8), coordinates(products * size, 8)
        torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found[1].double() / size, wanted[1] / size, rtol=1e-5, atol=0)

    def test_zeros(self) -> None:
        """A column of zeros stays one, of length 0; a block of them changes no other."""
        products = torch.randn(300, PARTS * 8, generator=seeded(0))
        products.view(300, PARTS, 8)[:, :, 3] = 0
        products[128:256] = 0
        a, lengths = self.unit_columns(products, 8)
        assert lengths[3] == 0
        assert not a[:, 3].any()
        torch.testing.assert_close(a.double(), coordinates(products, 8)[0], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_a_broken_entry_shows_in_its_column(self, value) -> None:
        products = torch.randn(300, PARTS * 8, generator=seeded(0))
        products[200, 2] = value
        a, lengths = self.unit_columns(products, 8)
        assert lengths.isfinite().tolist() == [place != 2 for place in range(8)]
        assert a.isnan().any(0).tolist() == [place == 2 for place in range(8)]
        assert a[:, 2].isnan().all()


class TestInInterpreter(ProjectionCases):
    device = "cpu"
