"""The buffers of native matrices are those that torchao hands to torch's GEMM."""

from __future__ import annotations

import pytest
import torch
from numerics import torchao_oracle as oracle

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import pack
from metis_hf.numerics.native import native_matrix, swizzle


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (300, 9)])
def test_swizzle(rows, blocks):
    scale = torch.randint(1, 256, (rows, blocks), dtype=torch.uint8)
    assert torch.equal(swizzle(scale), oracle.to_blocked(scale).flatten())


def test_codes_and_scales():
    x = torch.randn(144, 320)
    quantizer = Quantizer(two_level=False)
    packed = pack(x, quantizer)
    matrix = native_matrix(packed, quantizer, dim=-1, shape=(144, 320), contracted=-1)
    scale, codes = oracle.nvfp4_quantize(x, 16)
    assert torch.equal(matrix.scale, oracle.to_blocked(scale).flatten())
    differing = oracle.unpack_uint4(matrix.codes) != oracle.unpack_uint4(codes)
    # torchao divides where we multiply by a reciprocal: some ties fall to the other side.
    assert differing.sum() <= 0.001 * x.numel()
