"""Mean removal: the mean of the rows and what is left are quantized apart (arXiv 2603.10444)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands.conditioner import Conditioner, Encoded, Part, Work, as_fp32


@dataclass(frozen=True)
class MeanRemoved(Conditioner):
    """x_hat = 1 Q(mu) + Q(x - 1 mu) with mu [1 c] the mean of the rows of x [t c].

    The vector mu is stored along its length, in blocks of its own and with its own tensor scale,
    whichever dimension the GEMM contracts. Rows of padding take no part in the mean.
    """

    uses_row_mask: ClassVar[bool] = True

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        if x.numel() == 0:
            return x.to(dtype)
        mean = row_mean(x, row_mask)
        mean_hat = quantizer(mean, dim=-1, key=key.fold(1))
        return quantizer(
            x,
            dim=dim,
            key=key.fold(3),
            dtype=dtype,
            minus=mean.expand(x.shape),
            plus=mean_hat.expand(x.shape),
        )

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        mean = row_mean(x, row_mask)
        residual = x - mean
        return [
            Part("mean", mean, quantizer(mean, dim=-1, key=key.fold(1))),
            Part("residual", residual, quantizer(residual, dim=dim, key=key.fold(3))),
        ]

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        mean = row_mean(x, row_mask)
        residual = pack(x, quantizer, dim=dim, key=key.fold(3), minus=mean.expand(x.shape))
        return Encoded((*residual, *pack(mean, quantizer, dim=-1, key=key.fold(1))))

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        residual, mean = Packed(*encoded.tensors[:3]), Packed(*encoded.tensors[3:])
        plus = unpack(mean, quantizer, dim=-1, shape=(1, shape[1])).expand(shape)
        return unpack(residual, quantizer, dim=dim, shape=shape, dtype=dtype, plus=plus)

    def work(self, shape, *, dim) -> Work:
        t, c = shape
        # The sum of the rows, its subtraction, and the addition of the quantized mean.
        call, encode, decode = ({"elementwise": 1.0 * n * t * c} for n in (3, 2, 1))
        return Work(call, encode, decode, (shape, (1, c)), low_rank=1)


def row_mean(x: Tensor, row_mask: Tensor | None = None) -> Tensor:
    """Return [1 c], the mean of the rows of x [t c] that `row_mask` [t] keeps; fp32, fp64 for fp64.

    Without a single such row the mask is ignored.
    """
    x = as_fp32(x)
    if row_mask is None:
        return x.mean(0, keepdim=True)
    kept = row_mask | ~row_mask.any()
    total = torch.where(kept[:, None], x, torch.zeros_like(x)).sum(0, keepdim=True)
    return total / kept.sum()
