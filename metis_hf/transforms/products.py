"""The projection of a tall matrix on a thin basis."""

from __future__ import annotations

import torch
from torch import Tensor

from metis_hf.numerics.kernels.choice import kernels_for

_PARTS = 3  # numbers in BF16, of 8 bits, whose sum has the 24 bits of one in FP32
_ALIGNED = 8  # columns: tensor cores take whole vectors of 16 bytes


def project(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates of x [t c] in the basis v [c k]: unit columns [t k], lengths [k].

    In the dtype of `v`. A CUDA device multiplies `x` in BF16 by each of three matrices in BF16
    whose sum is `v`, and adds up in FP32. Products are exact, as they are of FP32 numbers, and
    tensor cores compute them; `x` is not written out in FP32. ROCm's GEMMs give no FP32 of BF16 up
    to torch 2.9.
    """
    mixed = x.dtype is torch.bfloat16 and v.dtype is torch.float32
    if mixed and torch.version.hip is None and kernels_for(x, v) == "triton":
        from metis_hf.numerics.kernels import triton_projection

        columns, width = v.shape
        parts = triton_projection.bf16_parts(v, _PARTS, -(-width // _ALIGNED) * _ALIGNED)
        products = torch.mm(x, parts.view(-1, columns).T, out_dtype=torch.float32)  # [t 3k']
        return triton_projection.unit_columns(products, _PARTS, width)
    p = x.to(v.dtype) @ v  # [t c] @ [c k] -> [t k]
    # In units of each column's largest entry, whose square stays in the fp32 range.
    largest = p.abs().amax(0)
    p = p / torch.where(largest == 0, torch.ones_like(largest), largest)
    length = torch.linalg.vector_norm(p, dim=0)
    return p / length.clamp_min(1.0), length * largest
