"""The spectral conditioner: thin factors and a residual, quantized separately."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed, fused, pack, pack_with_values, unpack
from metis_hf.numerics.kernels.layout import Low
from metis_hf.numerics.kernels.request import or_reference
from metis_hf.operands.conditioner import (
    Conditioner,
    Encoded,
    LowRank,
    Part,
)
from metis_hf.operands.conditioners.kept_subspace import KeptSubspace, Reuse, Subspaces
from metis_hf.transforms.products import project
from metis_hf.transforms.spectral import fewest_rows, find_basis


@dataclass(frozen=True)
class Spectral(Conditioner):
    """Splits off the dominant subspace, and quantizes factors and residual separately.

    arXiv 2509.00404: A Lambda B^T + X_R with A = `a`, Lambda = `lam`, B = `v`.

    Args:
        rank: k; fewer where the matrix has fewer rows or columns.
        sample_frac: share of rows from which the subspace is estimated.
        n_iter: power iterations.
        rows: least number of sampled rows, or sums of rows, for each column of the sketch.
        summed: estimate the subspace from sums of all rows with random signs
            (`transforms.spectral.sum_rows`); the paper samples rows.
        compensated: subtract the *quantized* low-rank part from x, so that the residual also
            carries the rounding errors of the factors; the paper subtracts the exact one.
        reuse: settings of the subspace that the layer's state keeps (`schemes.subspaces`); None:
            each call finds its own.
        kept: that subspace, bound for one call.
    """

    rank: int
    sample_frac: float = 0.01
    n_iter: int = 2
    rows: int = 4
    summed: bool = False
    compensated: bool = True
    reuse: Reuse | None = None
    kept: KeptSubspace | None = None

    draws: ClassVar[bool] = True
    uses_row_mask: ClassVar[bool] = True
    writes_values: ClassVar[bool] = True

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
        return self.with_factors(x, quantizer, dim=dim, key=key, row_mask=row_mask, dtype=dtype)[0]

    def with_factors(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, LowRank | None]:
        """Return (result of a call, its low-rank part or, for an empty matrix, None)."""
        if x.numel() == 0:
            return x.to(dtype), None
        a, lam, v, _ = self._find(x, key=key, row_mask=row_mask)
        options: dict[str, Any] = {"dim": dim, "key": key.fold(3), "dtype": dtype}
        kernels = self._kernels(quantizer, lam, dim, (x.shape[0], x.shape[1]))
        if kernels is not None:
            packed, low = _pack_factors(a, lam, v, quantizer, dim, key, dtype)
            if low is not None:
                given = {"scaled": True, "low": packed}
                with or_reference:
                    return kernels.fake_quantize(x.detach(), quantizer, **given, **options)[0], low
        low, dense, exact = self._quantize_factors(a, lam, v, quantizer, dim, key)
        return quantizer(x, minus=exact, plus=dense, out=dense, **options), low

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> list[Part]:
        a, lam, v = self.split(x, key=key, row_mask=row_mask)
        low, _, exact = self._quantize_factors(a, lam, v, quantizer, dim, key)
        residual = x - exact
        return [
            Part("a", a, low.left),
            Part("v", v.T, low.right),
            Part("residual", residual, quantizer(residual, dim=dim, key=key.fold(3))),
        ]

    def encode(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Encoded:
        """Run `Conditioner.encode`; given the `dtype` of a GEMM, kernels also write the values."""
        a, lam, v, found = self._find(x, key=key, row_mask=row_mask)
        shape = (x.shape[0], x.shape[1])
        kernels = self._kernels(quantizer, lam, dim, shape)
        options: dict[str, Any] = {"dim": dim, "key": key.fold(3), "dtype": dtype, "scaled": True}
        factors_dtype = lam.dtype if kernels is None else dtype or lam.dtype
        packed, low = _pack_factors(a, lam, v, quantizer, dim, key, factors_dtype)
        factors = (*packed.left, *packed.right, lam)
        if kernels is not None and low is not None:
            with or_reference:
                rest, values = kernels.pack_with_values(
                    x.detach(), quantizer, low=packed, **options
                )
                return Encoded((*rest, *factors), low, found=found, values=values)
        if kernels is not None or low is None:
            low = self._low(factors, quantizer, dim=dim, shape=shape)
        dense = low.dense()
        exact = dense if self.compensated else (a * lam) @ v.T
        if dtype is None:
            residual, values = pack(x, quantizer, dim=dim, key=key.fold(3), minus=exact), None
        else:
            options |= {"minus": exact, "plus": dense, "out": dense}
            residual, values = pack_with_values(x, quantizer, **options)
        return Encoded((*residual, *factors), low, dense if values is None else None, found, values)

    def decode(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        *_, lam = encoded.tensors
        options: dict[str, Any] = {"dim": dim, "shape": shape, "dtype": dtype}
        kernels = self._kernels(quantizer, lam, dim, shape) if encoded.dense is None else None
        if kernels is not None:
            left, right = encoded.factors
            given = {"scaled": True, "low": Low(left, lam, right)}
            with or_reference:
                x_hat: Tensor = kernels.unpack(encoded.packed, quantizer, **given, **options)
                return x_hat
        if encoded.dense is not None:
            return unpack(encoded.packed, quantizer, plus=encoded.dense, **options)
        low = encoded.low or self._low(encoded.tensors[3:], quantizer, dim=dim, shape=shape)
        dense = low.dense()
        return unpack(encoded.packed, quantizer, plus=dense, out=dense, **options)

    def decode_with_factors(
        self,
        encoded: Encoded,
        quantizer: Quantizer,
        *,
        dim: int,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, LowRank | None]:
        """Return the result of `with_factors` from its codes."""
        low = encoded.low or self._low(encoded.tensors[3:], quantizer, dim=dim, shape=shape)
        encoded = encoded._replace(low=low)
        return self.decode(encoded, quantizer, dim=dim, shape=shape, dtype=dtype), low

    def bind(self, state: Any) -> Spectral:
        if self.reuse is None or not isinstance(state, Subspaces):
            return self
        return replace(self, kept=getattr(state, self.reuse.tensor))

    def take_over(self, found: tuple[Tensor, object]) -> None:
        if self.kept is not None:
            self.kept.take_over(found)

    def basis(self, tensor: str) -> Hashable:
        return "plain"

    def codes(
        self, encoded: Encoded, quantizer: Quantizer, *, dim: int, shape: tuple[int, int]
    ) -> tuple[Encoded, tuple[int, int]]:
        if encoded.low is None:
            low = self._low(encoded.tensors[3:], quantizer, dim=dim, shape=shape)
            encoded = encoded._replace(low=low)
        return encoded, shape

    @staticmethod
    def _low(
        packed: Sequence[Any], quantizer: Quantizer, *, dim: int, shape: tuple[int, int]
    ) -> LowRank:
        """Unpack the factors of a matrix of that shape."""
        lam = packed[6]
        (t, c), k = shape, lam.shape[0]
        a_hat = unpack(Packed(*packed[:3]), quantizer, dim=dim, shape=(t, k))
        vh_hat = unpack(Packed(*packed[3:6]), quantizer, dim=dim, shape=(k, c))
        return LowRank(a_hat.to(lam.dtype), lam, vh_hat.to(lam.dtype))

    def _quantize_factors(
        self, a: Tensor, lam: Tensor, v: Tensor, quantizer: Quantizer, dim: int, key: Key
    ) -> tuple[LowRank, Tensor, Tensor]:
        """Return (quantized low-rank part, its product, matrix to subtract from x)."""
        # Row blocks of every part run along the dimension that the GEMM contracts.
        a_hat = quantizer(a, dim=dim, key=key.fold(1)).to(v.dtype)
        vh_hat = quantizer(v.T, dim=dim, key=key.fold(2)).to(v.dtype)
        low = LowRank(a_hat, lam, vh_hat)
        dense = low.dense()
        return low, dense, dense if self.compensated else (a * lam) @ v.T

    def _kernels(
        self, quantizer: Quantizer, lam: Tensor, dim: int, shape: tuple[int, int]
    ) -> ModuleType | None:
        """Return the kernels that multiply out the packed factors; None if there are none."""
        if not self.compensated or type(quantizer) is not Quantizer:
            return None
        return fused.taking_low(lam, quantizer, dim=dim, shape=shape)

    def split(
        self, x: Tensor, *, key: Key, row_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (a [t k], lam [k], v [c k]), not quantized: x ~ a diag(lam) v^T.

        v comes from sampled rows or an earlier step; a and lam come from projecting every row.
        """
        return self._find(x, key=key, row_mask=row_mask)[:3]

    def _find(
        self, x: Tensor, *, key: Key, row_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return the result of `split`, and `Encoded.found` for later steps."""
        kept, found = self.kept, None
        v = None if kept is None else kept.basis
        if v is not None and x.dtype is torch.float64:
            v = v.double()
        if kept is None or v is None or kept.refinements:
            v = self._subspace(x, v, key=key, row_mask=row_mask)
            found = None if kept is None else kept.keep(v)
        a, lam = project(x, v, key.scratch)  # [t k] [k]
        return a, lam, v, found

    def _subspace(
        self, x: Tensor, start: Tensor | None, *, key: Key, row_mask: Tensor | None
    ) -> Tensor:
        """Find v [c k] of x [t c], starting from a kept basis [c k] if there is one."""
        rank = min(self.rank, *x.shape)
        rows: dict[str, Any] = {
            "sample_frac": self.sample_frac,
            "min_rows": fewest_rows(rank, self.rows),
            "key": key,
            "row_mask": row_mask,
            "summed": self.summed,
        }
        if start is not None:
            assert self.kept is not None
            return find_basis(x, start.shape[1], n_iter=self.kept.refinements, start=start, **rows)
        return find_basis(x, rank, n_iter=self.n_iter, **rows)


def _pack_factors(
    a: Tensor, lam: Tensor, v: Tensor, quantizer: Quantizer, dim: int, key: Key, dtype: torch.dtype
) -> tuple[Low, LowRank | None]:
    """Return the packed factors and their values in `dtype`; None if no kernel can do both."""
    options: dict[str, Any] = {"dim": dim, "dtype": dtype, "scaled": True}
    left, a_hat = pack_with_values(a, quantizer, key=key.fold(1), **options)
    right, vh_hat = pack_with_values(v.T, quantizer, key=key.fold(2), **options)
    low = None if a_hat is None or vh_hat is None else LowRank(a_hat, lam, vh_hat)
    return Low(left, lam, right), low
