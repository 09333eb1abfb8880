"""Agreement with torchao's NVFP4 and MX casts, bit for bit.

They part in these places, where our values are the reference's (test_formats.py). torchao breaks
ties of two-level bf16 data otherwise. It clamps E4M3 scales at 2^-6, so that small blocks keep
fewer codes. There a two-level tensor of zeros is NaN, and a block with an infinity is not. RCEIL
misses maxima just above a power of two, and blocks with the smallest MX scale lose their values.
"""

from __future__ import annotations

import math

import pytest
import torch

from metis_hf.numerics import quantize
from metis_hf.numerics.storage import unpack
from numerics import torchao_oracle as oracle
from numerics.cases import MX_FORMATS, assert_same_bits, label
from numerics.helpers import normal, seeded

ELEMENT_DTYPES = {
    "mxfp4": torch.float4_e2m1fn_x2,
    "mxfp8-e4m3": torch.float8_e4m3fn,
    "mxfp8-e5m2": torch.float8_e5m2,
}
MODES = {"floor": "FLOOR", "up": "RCEIL", "even": "EVEN"}  # of ScaleCalculationMode


@pytest.mark.parametrize(
    ("dtype", "two_level"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)],
    ids=label,
)
def test_nvfp4_codes_and_scales_are_identical(dtype, two_level) -> None:
    """On N(0, 1), in the packed bytes; not so in bf16 with a tensor scale."""
    x = torch.randn(128, 256, generator=seeded(0)).to(dtype)
    tensor_scale = oracle.per_tensor_amax_to_scale(x.abs().max()) if two_level else None
    scale, packed = oracle.nvfp4_quantize(x, 16, tensor_scale)
    q = quantize(x, two_level=two_level)
    assert torch.equal(q.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(q.codes, packed)


@pytest.mark.parametrize("fmt", MX_FORMATS)
@pytest.mark.parametrize("scale_rounding", MODES)
def test_mx_codes_scales_and_values_are_identical(fmt, scale_rounding) -> None:
    """FLOOR is "floor", RCEIL is "up" and EVEN is "even"; FP6 codes lie one to a byte there."""
    six_bits = {"mxfp6-e2m3": oracle.DTYPE_FP6_E2M3, "mxfp6-e3m2": oracle.DTYPE_FP6_E3M2}
    dtype = (ELEMENT_DTYPES | six_bits)[fmt]
    mode = oracle.ScaleCalculationMode[MODES[scale_rounding]]
    inputs = [torch.randn(64, 128, generator=seeded(0)), normal(64, 128)]
    inputs += [x.bfloat16() for x in inputs]
    inputs.append(inputs[-1].clone())
    inputs[-1][0, 3] = math.nan
    for x in inputs:
        scale, codes = oracle.to_mx(x, dtype, 32, mode)
        q = quantize(x.float(), fmt, scale_rounding=scale_rounding)
        assert len(scale.view(torch.uint8).unique()) > 2
        assert torch.equal(q.scale.view(torch.uint8), scale.view(torch.uint8))
        values = oracle.to_dtype(codes, scale, dtype, 32, torch.float32)
        assert_same_bits(q.dequantize(), values)
        ours, theirs = unpack(q.codes, 6) if fmt in six_bits else q.codes, codes.view(torch.uint8)
        whole = slice(int(x.isnan().any()), None)  # codes of the row with a NaN are anything
        assert torch.equal(ours[whole], theirs[whole])
