"""The epilogue of a GEMM: what it must give, on any device.

test_kernels_on_gpu.py runs `EpilogueCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from metis_hf.numerics.kernels import use_kernels
from metis_hf.numerics.kernels.epilogue import error_along, finish_product
from metis_hf.numerics.kernels.scratch import WORDS, Measured, Scratch
from numerics.cases import assert_same_bits
from numerics.helpers import seeded

FP32 = torch.finfo(torch.float32).eps
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

    @pytest.mark.parametrize("kinds", [(), ("tensor",), ("rows", "columns")], ids=str)
    @pytest.mark.parametrize("width", [1, 48, 70])
    def test_terms_are_added_between_scale_and_bias(self, kinds, width) -> None:
        """Each rounded; factors are transposed too, and sums may be in any order."""
        for shape, dtype in itertools.product(SHAPES, DTYPES):
            out = (torch.randn(shape, generator=seeded(0)) * 300).to(dtype)
            scales = [scale_of(kind, shape, place) for place, kind in enumerate(kinds)]
            bias = torch.randn(shape[1], generator=seeded(9))
            left = torch.randn(shape[0], width, generator=seeded(7)).to(dtype)
            right = torch.randn(shape[1], width, generator=seeded(8)).to(dtype).T
            found = out.clone().to(self.device)
            given = [each.to(self.device) for each in scales], bias.to(self.device)
            with use_kernels(self.kernels):
                finish_product(found, *given, [(left.to(self.device), right.to(self.device))])
            scaled = by_hand(out, scales, None).double()
            wanted = scaled + left.double() @ right.double() + bias.to(dtype).double()
            bound = torch.finfo(dtype).eps * (wanted.abs() + (wanted - bias).abs() + scaled.abs())
            bound += width * FP32 * (left.double().abs() @ right.double().abs())
            assert ((found.cpu().double() - wanted).abs() <= bound).all()

    def test_two_terms(self) -> None:
        found = torch.zeros(20, 40).to(self.device)
        left, right = torch.ones(20, 3).to(self.device), torch.ones(3, 40).to(self.device)
        with use_kernels(self.kernels):
            finish_product(found, terms=[(left, right), (left, right)])
        assert (found == 6).all()

    @pytest.mark.parametrize("kind", ["no scale", "tensor", "rows", "columns"])
    def test_errors_of_single_elements(self, kind) -> None:
        """Each in fp32, rounded once; of a transposed matrix too, and of part of one."""
        for shape, dtype, transposed in itertools.product(SHAPES, DTYPES, (False, True)):
            wide = torch.randn(shape[0] + 1, shape[1] + 2, generator=seeded(0)) * 300
            x, values = wide[1:, 2:].to(dtype), torch.randn(shape, generator=seeded(1)).bfloat16()
            scale = None if kind == "no scale" else scale_of(kind, shape, 2) * 1e6
            whole = torch.ones(()) if scale is None else scale.expand(shape)
            wanted = (x.float() - values.float() * whole).to(torch.bfloat16).float()
            if transposed:
                x, values, wanted = x.T, values.T, wanted.T
                scale = None if scale is None else scale.mT if scale.dim() else scale
            found = self.along(x, values, scale, torch.eye(x.shape[1]), torch.ones(x.shape[1]))
            assert_same_bits(found, wanted)

    @pytest.mark.parametrize("bad", [None, torch.nan, torch.inf])
    @pytest.mark.parametrize("width", [1, 48, 130])
    def test_errors_along_directions(self, width, bad) -> None:
        """The largest one is known to the quantizer that takes them; a bad row is bad alone."""
        for shape, dtype in itertools.product(SHAPES, [torch.float32, torch.bfloat16]):
            x = torch.randn(shape, generator=seeded(0))
            values = (x + torch.randn(shape, generator=seeded(1)) / 8).to(dtype)
            if bad is not None:
                x[0, 0] = bad
            directions = torch.randn(width, shape[1], generator=seeded(2)).T
            lengths = scale_of("columns", (1, width), 3)[0]
            found = self.along(x, values, None, directions, lengths)
            error = (x - values.float()).to(dtype).double()
            product = error @ directions.to(dtype).double()
            bound = torch.finfo(dtype).eps * product.abs()
            bound += shape[1] * FP32 * (error.abs() @ directions.abs().double())
            wanted, bound = product * lengths, bound * lengths
            first = 0 if bad is None else 1
            assert ((found.double() - wanted).abs() <= bound)[first:].all()
            assert bad is None or not found[0].isfinite().any()

    def along(self, *given: Tensor | None) -> Tensor:
        """`error_along`, whose largest magnitude is what the scratch memory has kept."""
        words = torch.zeros(WORDS, dtype=torch.int32).to(self.device)
        scratch = Scratch(words)
        with use_kernels(self.kernels):
            there = [None if each is None else each.to(self.device) for each in given]
            found = error_along(*there, scratch)
            known = scratch.amax(Measured(found))
        assert found.dtype is torch.float32
        if self.kernels == "triton":
            assert known is not None
            assert_same_bits(known.cpu().view(torch.float32), found.cpu().abs().amax())
        return found.cpu()

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
