"""Mean removal: the mean of the rows and the rest are quantized separately (arXiv 2603.10444)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands.conditioner import Conditioner, Encoded, Part, as_fp32
from metis_hf.operands.conditioners.identity import IDENTITY


@dataclass(frozen=True)
class MeanRemoved(Conditioner):
    """x_hat = 1 Q(mu) + Q(x - 1 mu) with mu [1 c] the mean of the rows of x [t c].

    mu is quantized in its own blocks along c and with its own tensor scale, whichever dimension the
    GEMM contracts. Padding rows do not count in the mean.

    Args:
        inner: the conditioner of the rest: a rotation R gives R^T Q(R (x - 1 mu)). The mean is not
            added to rows and columns that it pads.
        exact: the mean is not quantized.
    """

    inner: Conditioner = IDENTITY
    exact: bool = False

    uses_row_mask: ClassVar[bool] = True

    @property
    def has_codes(self) -> bool:  # type: ignore[override]
        return self.inner.has_codes

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.inner.draws

    @property
    def needs_state(self) -> bool:  # type: ignore[override]
        return self.inner.needs_state

    def bind(self, state: Any) -> MeanRemoved:
        return replace(self, inner=self.inner.bind(state))

    def turned(self) -> MeanRemoved:
        return replace(self, inner=self.inner.turned())

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
        mean = row_mean(x, row_mask)
        mean_hat = mean if self.exact else quantizer(mean, dim=-1, key=key.fold(1))
        if self.inner == IDENTITY:  # one pass over memory
            return quantizer(
                x,
                dim=dim,
                key=key.fold(3),
                dtype=dtype,
                minus=mean.expand(x.shape),
                plus=mean_hat.expand(x.shape),
            )
        options = _rest(dim, key, row_mask)
        rest = self.inner(as_fp32(x) - mean, quantizer, dtype=_wide(dtype), **options)
        return _with_mean(rest, mean_hat, (x.shape[0], x.shape[1]), dtype)

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> list[Part]:
        mean = row_mean(x, row_mask)
        residual = x - mean
        first = []
        if not self.exact:
            first = [Part("mean", mean, quantizer(mean, dim=-1, key=key.fold(1)))]
        if self.inner == IDENTITY:
            rest = quantizer(residual, dim=dim, key=key.fold(3))
            return [*first, Part("residual", residual, rest)]
        return [*first, *self.inner.parts(residual, quantizer, **_rest(dim, key, row_mask))]

    def encode(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> Encoded:
        mean = row_mean(x, row_mask)
        packed = (mean,) if self.exact else pack(mean, quantizer, dim=-1, key=key.fold(1))
        if self.inner == IDENTITY:
            minus = mean.expand(x.shape)
            rest = pack(x, quantizer, dim=dim, key=key.fold(3), minus=minus)
            return Encoded((*rest, *packed))
        inner = self.inner.encode(as_fp32(x) - mean, quantizer, **_rest(dim, key, row_mask))
        return Encoded((*inner.tensors, *packed))

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        if self.exact:
            *rest, mean_hat = encoded.tensors
            assert mean_hat is not None
        else:
            *rest, codes, scale, decode = encoded.tensors
            packed = Packed(codes, scale, decode)
            mean_hat = unpack(packed, quantizer, dim=-1, shape=(1, shape[1]))
        options: dict[str, Any] = {"dim": dim, "shape": shape}
        if self.inner == IDENTITY:
            plus = mean_hat.expand(shape)
            return unpack(Packed(*rest), quantizer, dtype=dtype, plus=plus, **options)
        residual = self.inner.decode(Encoded(tuple(rest)), quantizer, dtype=_wide(dtype), **options)
        return _with_mean(residual, mean_hat, shape, dtype)


def _rest(dim: int, key: Key, row_mask: Tensor | None) -> dict[str, Any]:
    """Return the options of the inner conditioner."""
    return {"dim": dim, "key": key.fold(3), "row_mask": row_mask}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that the two terms are added in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _with_mean(rest: Tensor, mean: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Add the mean [1 c] to the part [t c] of rest [t' c'] that is not padding."""
    rows, columns = shape
    if rest.shape == shape:
        return (rest + mean).to(dtype)
    total = rest.clone()
    total[:rows, :columns] += mean
    return total.to(dtype)


def row_mean(x: Tensor, row_mask: Tensor | None = None) -> Tensor:
    """Return the mean [1 c] of the rows of x [t c] that `row_mask` [t] keeps, fp32 (fp64 for fp64).

    A mask that keeps no row is ignored.
    """
    x = as_fp32(x)
    if row_mask is None:
        return x.mean(0, keepdim=True)
    kept = row_mask | ~row_mask.any()
    total = torch.where(kept[:, None], x, torch.zeros_like(x)).sum(0, keepdim=True)
    return total / kept.sum()
