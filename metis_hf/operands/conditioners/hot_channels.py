"""Quantized residuals of the channels with the largest errors (HCP, arXiv 2602.02047)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands.conditioner import Conditioner, Encoded, Part


@dataclass(frozen=True)
class HotChannels(Conditioner):
    """x_hat = Q(x) + Q(x - Q(x)) in the channels of largest error, Q(x) in the others.

    Hot-Channel Patch, arXiv 2602.02047, section 4: channels along the contraction are ranked by
    their mean absolute quantization error, and the residuals of the worst are appended to the GEMM
    as channels, [x_hat, r_hat] @ [w_hat, w_hat_hot]^T and likewise for w. Residuals are quantized
    like the matrix, in separate blocks along the appended channels.

    Args:
        share: of the channels to patch, rounded up to whole blocks of 16.
    """

    share: float = 1 / 16

    def __call__(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        if x.numel() == 0:
            return x.to(dtype)
        quantized, channels, residual = self._residual(x, quantizer, dim, key)
        residual_hat = quantizer(residual, dim=dim, key=key.fold(1))
        return quantized.index_add(dim, channels, residual_hat).to(dtype)

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> list[Part]:
        quantized, _, residual = self._residual(x, quantizer, dim, key)
        residual_hat = quantizer(residual, dim=dim, key=key.fold(1))
        return [Part("hot residual", residual, residual_hat), Part("tensor", x, quantized)]

    def encode(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> Encoded:
        packed = pack(x, quantizer, dim=dim, key=key)
        quantized = unpack(packed, quantizer, dim=dim, shape=(x.shape[0], x.shape[1]))
        channels, residual = self._hot(x - quantized, dim)
        patch = pack(residual, quantizer, dim=dim, key=key.fold(1))
        return Encoded((*packed, *patch, channels.to(torch.int32)))

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        *packed, channels = encoded.tensors
        quantized = unpack(Packed(*packed[:3]), quantizer, dim=dim, shape=shape)
        rows, columns = shape
        hot = (rows, len(channels)) if dim % 2 else (len(channels), columns)
        residual = unpack(Packed(*packed[3:]), quantizer, dim=dim, shape=hot)
        return quantized.index_add(dim, channels, residual).to(dtype)

    def channels(self, n: int) -> int:
        """Return the number of patched channels among n."""
        return min(n, 16 * max(1, -(-round(self.share * n * 1e6) // 16_000_000)))

    def _residual(
        self, x: Tensor, quantizer: Quantizer, dim: int, key: Key
    ) -> tuple[Tensor, Tensor, Tensor]:
        quantized = quantizer(x, dim=dim, key=key)
        return quantized, *self._hot(x - quantized, dim)

    def _hot(self, error: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return (sorted indices of the worst channels, their columns or rows of `error`)."""
        score = error.abs().mean(1 - dim % 2)
        channels = score.topk(self.channels(len(score)), sorted=False).indices.sort().values
        return channels, error.index_select(dim, channels)
