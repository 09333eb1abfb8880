"""The product of a tall matrix in BF16 with a thin one in FP32."""

from __future__ import annotations

import torch
from torch import Tensor

from metis_hf.numerics.kernels.choice import kernels_for

_PARTS = 3  # numbers in BF16, of 8 bits, whose sum has the 24 bits of one in FP32
_ALIGNED = 8  # columns: tensor cores take whole vectors of 16 bytes


def thin_product(x: Tensor, v: Tensor) -> Tensor:
    """Return x [t c] @ v [c k], in the dtype of `v`.

    A CUDA device multiplies `x` in BF16 by each of three matrices in BF16 whose sum is `v`, and
    adds up in FP32. Products are exact, as they are of FP32 numbers, and tensor cores compute them;
    `x` is not written out in FP32. ROCm's GEMMs give no FP32 of BF16 up to torch 2.9.
    """
    mixed = x.dtype is torch.bfloat16 and v.dtype is torch.float32
    if mixed and torch.version.hip is None and kernels_for(x, v) == "triton":
        (rows, columns), width = x.shape, v.shape[1]
        parts = bf16_parts(v.T, -(-width // _ALIGNED) * _ALIGNED)  # [3 k' c]
        products = torch.mm(x, parts.view(-1, columns).T, out_dtype=torch.float32)
        return products.view(rows, _PARTS, -1)[:, :, :width].sum(1)
    return x.to(v.dtype) @ v


def bf16_parts(v: Tensor, rows: int) -> Tensor:
    """Split an fp32 matrix [k c] into three in bf16 whose sum it is, [3 rows c].

    Numbers below 2^-110 may lose their last bits. Rows from k on are zero.
    """
    parts = torch.zeros(_PARTS, rows, v.shape[1], dtype=torch.bfloat16, device=v.device)
    for part in parts:
        rounded = v.to(torch.bfloat16)
        part[: len(v)] = rounded
        v = v - rounded
    return parts
