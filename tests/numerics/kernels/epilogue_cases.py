"""The epilogue of a GEMM: what it must give, on any device.

test_kernels_on_gpu.py runs `EpilogueCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from metis_hf.numerics.kernels import use_kernels
from metis_hf.numerics.kernels.epilogue import finish_product, multiply_columns, rounding_error
from metis_hf.numerics.kernels.scratch import WORDS, Measured, Scratch
from numerics.cases import assert_same_bits
from numerics.helpers import seeded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (1, 40), (40, 1), (37, 48), (130, 33)]
SCALES = {
    "no scale": (),
    "tensor": ("tensor",),
    "rows": ("rows",),
    "columns": ("columns",),
    "both": ("rows", "columns"),
    "tensor and rows": ("tensor", "rows"),
}


def scale_of(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    rows, columns = shape
    size = {"tensor": (), "rows": (rows, 1), "columns": (1, columns)}[kind]
    return torch.rand(size, generator=seeded(seed)) * 3e-4 + 1e-5


def by_hand(out: Tensor, scales: list[Tensor], bias: Tensor | None) -> Tensor:
    """Each element in fp32, rounded after the scale and after the sum."""
    if scales:
        whole = torch.ones(out.shape)
        for scale in scales:
            whole = whole * scale.expand(out.shape)
        out = (out.float() * whole).to(out.dtype)
    if bias is not None:
        out = (out.float() + bias.to(out.dtype).float()).to(out.dtype)
    return out


class EpilogueCases:
    kernels: str
    device: str

    @pytest.mark.parametrize("kinds", SCALES.values(), ids=SCALES)
    def test_products_are_those_by_hand(self, kinds) -> None:
        for shape, dtype, with_bias in itertools.product(SHAPES, DTYPES, (False, True)):
            out = (torch.randn(shape, generator=seeded(0)) * 300).to(dtype)
            out[0, 0] = float("inf")
            scales = [scale_of(kind, shape, place) for place, kind in enumerate(kinds)]
            bias = torch.randn(shape[1], generator=seeded(9)) * 0.1 if with_bias else None
            found = out.clone().to(self.device)
            with use_kernels(self.kernels):
                finish_product(
                    found,
                    [scale.to(self.device) for scale in scales],
                    None if bias is None else bias.to(self.device),
                )
            assert_same_bits(found.cpu(), by_hand(out, scales, bias))

    def test_numbers_beyond_one_program(self) -> None:
        out = torch.randn(70, 203, generator=seeded(0)).bfloat16()
        scale, bias = scale_of("columns", (70, 203), 1), torch.randn(203, generator=seeded(2))
        found = out.clone().to(self.device)
        with use_kernels(self.kernels):
            finish_product(found, [scale.to(self.device)], bias.to(self.device))
        assert_same_bits(found.cpu(), by_hand(out, [scale], bias))

    @pytest.mark.parametrize("kind", ["no scale", "tensor", "rows"])
    def test_what_rounding_took_off(self, kind) -> None:
        """Each element in fp32, rounded once; of a transposed matrix too, and of part of one."""
        for shape, dtype, transposed in itertools.product(SHAPES, DTYPES, (False, True)):
            wide = torch.randn(shape[0] + 1, shape[1] + 2, generator=seeded(0)) * 300
            x = wide.T.contiguous().T[1:, 2:] if transposed else wide[1:, 2:]
            x, values = x.to(dtype), torch.randn(shape, generator=seeded(1)).to(torch.bfloat16)
            values[0, 0] = torch.nan
            scale = None if kind == "no scale" else scale_of(kind, shape, 2) * 1e6
            with use_kernels(self.kernels):
                found = rounding_error(
                    x.to(self.device),
                    values.to(self.device),
                    None if scale is None else scale.to(self.device),
                    torch.bfloat16,
                )
            whole = torch.ones(()) if scale is None else scale.expand(shape)
            wanted = (x.float() - values.float() * whole).to(torch.bfloat16)
            assert_same_bits(found.cpu(), wanted)

    @pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf])
    def test_columns_times_lengths(self, value) -> None:
        """In fp32; the largest magnitude is known to the quantizer that takes them."""
        for shape, dtype in itertools.product(SHAPES, DTYPES):
            x = torch.randn(shape, generator=seeded(0)).to(dtype)
            x[0, 0] = value
            lengths = scale_of("columns", shape, 1)[0]
            words = torch.zeros(WORDS, dtype=torch.int32).to(self.device)
            with use_kernels(self.kernels):
                scratch = Scratch(words)
                given = x.to(self.device), lengths.to(self.device)
                found = multiply_columns(*given, scratch)
                known = scratch.amax(Measured(found))
            assert_same_bits(found.cpu(), x.float() * lengths)
            if self.kernels == "triton":
                assert known is not None
                assert_same_bits(known.cpu().view(torch.float32), found.cpu().abs().amax())

    @pytest.mark.parametrize("form", ["transposed", "batches", "fp64", "empty"])
    def test_operations_take_what_the_kernel_does_not(self, form) -> None:
        out = torch.randn(3, 16, 32, generator=seeded(0))
        out = {
            "transposed": lambda: out[0].T,
            "batches": lambda: out,
            "fp64": lambda: out[0].double(),
            "empty": lambda: out[0, :0],
        }[form]()
        scale, bias = scale_of("tensor", (1, 1), 1), torch.randn(out.shape[-1], generator=seeded(2))
        found = out.clone(memory_format=torch.preserve_format).to(self.device)
        with use_kernels(self.kernels):
            finish_product(found, [scale.to(self.device)], bias.to(self.device))
        assert found.dtype is out.dtype
        wanted = out * scale + bias.to(out.dtype)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6)


class TestInInterpreter(EpilogueCases):
    kernels = "triton"
    device = "cpu"
