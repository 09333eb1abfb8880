"""Clamping, with a sparse rest in high precision (OCC, arXiv 2501.17116)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands.conditioner import Conditioner, Encoded, Part

# dtype of x -> dtype of the sparse part, which is BF16 for BF16 and FP32.
_SPARSE_DTYPES = {torch.float64: torch.float64, torch.float16: torch.float16}


class Sparse(NamedTuple):
    """A matrix [t c] in CSR format, with room for n entries.

    Attributes:
        values: [n]; zero where there is no entry.
        columns: [n], int16 if c fits, else int32.
        row_ends: int32 [t], number of entries up to the end of each row.
    """

    values: Tensor
    columns: Tensor
    row_ends: Tensor

    @classmethod
    def difference(cls, a: Tensor, b: Tensor, mask: Tensor, room: int) -> Sparse:
        """Return a - b [t c] at the True entries of `mask`, at most `room` of them."""
        width, size = a.shape[1], a.numel()
        # The number of entries stays on the device.
        at = torch.nonzero_static(mask.view(-1), size=room, fill_value=size)[:, 0]
        inside = at.clamp(max=size - 1)
        values = (a.view(-1)[inside] - b.view(-1)[inside]).masked_fill(at == size, 0)
        narrow = width <= torch.iinfo(torch.int16).max
        columns = (inside % width).to(torch.int16 if narrow else torch.int32)
        return cls(values, columns, mask.sum(1).cumsum(0, dtype=torch.int32))

    def add_to(self, dense: Tensor) -> Tensor:
        """Add this to dense [t c], in place."""
        places = torch.arange(len(self.values), dtype=torch.int32, device=dense.device)
        rows = torch.searchsorted(self.row_ends, places, right=True).clamp_(max=len(dense) - 1)
        flat = rows * dense.shape[1] + self.columns
        dense.view(-1).index_add_(0, flat, self.values.to(dense.dtype))
        return dense


@dataclass(frozen=True)
class Clamped(Conditioner):
    """x_hat = Q(clamp(x, lo, hi)) + rest, with the sparse rest x - clamp(x, lo, hi) not quantized.

    Outlier clamping and compensation, arXiv 2501.17116, section 3.2. lo and hi are the quantiles
    1 - alpha and alpha of the whole matrix, within 1 % of their magnitude: see `thresholds`. The
    sparse part, at most 2 (1 - alpha) of the elements, is in BF16 (fp16 and fp64 keep their dtype).

    Args:
        alpha: quantile beyond which elements are clamped, on either side.
    """

    alpha: float = 0.99

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
        clamped, sparse = self._separate(x)
        return sparse.add_to(quantizer(clamped, dim=dim, key=key).contiguous()).to(dtype)

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> list[Part]:
        clamped, _ = self._separate(x)
        return [Part("clamped", clamped, quantizer(clamped, dim=dim, key=key))]

    def encode(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> Encoded:
        clamped, sparse = self._separate(x)
        return Encoded((*pack(clamped, quantizer, dim=dim, key=key), *sparse))

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        packed, sparse = Packed(*encoded.tensors[:3]), Sparse(*encoded.tensors[3:])
        quantized = unpack(packed, quantizer, dim=dim, shape=shape)
        return sparse.add_to(quantized.contiguous()).to(dtype)

    def outliers(self, size: int) -> int:
        """Return the largest number of elements beyond each threshold, out of `size`."""
        return int((1 - self.alpha) * size + 1e-6)

    def _separate(self, x: Tensor) -> tuple[Tensor, Sparse]:
        """Return clamp(x, lo, hi), fp32 or fp64, and the sparse rest of x [t c]."""
        count = self.outliers(x.numel())
        x, kind = x.contiguous(), _SPARSE_DTYPES.get(x.dtype, torch.bfloat16)
        x32 = x.float()
        low, high = thresholds(x32, count)
        x = x if x.dtype is torch.float64 else x32
        clamped = torch.where(x32 > high, high.to(x.dtype), x)
        clamped = torch.where(x32 < low, low.to(x.dtype), clamped)
        outside = (x32 > high) | (x32 < low)
        sparse = Sparse.difference(x, clamped, outside, 2 * count)
        # torch.compile of 2.8 does not trace `_replace`.
        return clamped, Sparse(sparse.values.to(kind), sparse.columns, sparse.row_ends)


def thresholds(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return thresholds beyond which at most `count` elements of x (fp32) lie, on each side.

    They come from a histogram of the upper 16 bits, whose bins are 1/256 to 1/128 of their values
    wide: one pass, no sorting, no host sync. A threshold is the outer edge of its bin. NaN counts
    as the largest magnitude of its sign.

    Returns:
        (low, high), 0-dim fp32.
    """
    upper = x.view(torch.int16).view(-1, 2)[:, 1]  # little-endian
    order = (upper ^ (upper >> 15 & 0x7FFF)).int() + 0x8000  # ordered as the numbers are
    one = torch.ones((), dtype=torch.int32, device=x.device)
    bins = torch.zeros(1 << 16, dtype=torch.int32, device=x.device)
    upto = bins.index_add_(0, order, one.expand(order.numel())).cumsum(0)
    highest = (x.numel() - upto > count).sum()
    lowest = (upto <= count).sum()
    return _edge(lowest, upward=False), _edge(highest, upward=True)


def _edge(place: Tensor, *, upward: bool) -> Tensor:
    """Return the largest (`upward`) or smallest number of the bin at `place`; 0-dim fp32."""
    order = place - 0x8000
    upper = order ^ (order >> 15 & 0x7FFF)
    outward = (order >= 0) == upward  # the lower bits belong to the magnitude
    return ((upper << 16) + 0xFFFF * outward).to(torch.int32).view(torch.float32)
