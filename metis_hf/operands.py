"""Operand = conditioner x quantizer: how one tensor enters one GEMM.

A conditioner turns a matrix into something that quantizes better and back again:
identity is `qdq(x)`, rotation is `unrotate(qdq(rotate(x)))`, spectral is
`qdq(a) * lam @ qdq(v.T) + qdq(residual)`. A new outlier trick is one conditioner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.transforms.hadamard import rotate, unrotate
from metis_hf.transforms.spectral import default_rows, find_subspace, project


class Part(NamedTuple):
    """One tensor that a conditioner hands to the quantizer, before and after; for statistics."""

    name: str
    before: Tensor
    after: Tensor


class Conditioner(Protocol):
    """x [t c] -> x_hat [t c], fp32, quantizing what it likes on the way.

    Along `dim`, which the GEMM contracts, x_hat may come with padding.
    """

    def __call__(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None
    ) -> Tensor: ...

    def parts(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None
    ) -> list[Part]: ...


@dataclass(frozen=True)
class Identity:
    """Quantizes the matrix as it is."""

    def __call__(self, x, quantizer, *, dim, key, row_mask=None) -> Tensor:
        return quantizer(x, dim=dim, key=key)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        return [Part("tensor", x, quantizer(x, dim=dim, key=key))]


@dataclass(frozen=True)
class Hadamard:
    """Rotates blocks of 16 along the contraction dimension, quantizes, rotates back.

    Both operands of a GEMM rotated with the same seed give the product of the rotated copies,
    since the rotation is orthonormal and cancels in the contraction. The result keeps the padding
    along `dim`, a multiple of 16: rounding in the rotated basis makes it non-zero, and the product
    of the rotated copies contains it.
    """

    seed: int = 0

    def __call__(self, x, quantizer, *, dim, key, row_mask=None) -> Tensor:
        rotated = rotate(_fp32(x), dim=dim, seed=self.seed)
        quantized = quantizer(rotated, dim=dim, key=key)
        return unrotate(quantized, dim=dim, seed=self.seed)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        rotated = rotate(_fp32(x), dim=dim, seed=self.seed)
        return [Part("rotated", rotated, quantizer(rotated, dim=dim, key=key))]


@dataclass(frozen=True)
class Spectral:
    """Splits the dominant subspace off and quantizes factors and residual apart.

    arXiv 2509.00404: A Lambda B^T + X_R with A = `a`, Lambda = `lam`, B = `v`.

    Args:
        rank: k; fewer where the matrix has fewer rows or columns.
        sample_frac: share of rows that the subspace is estimated from.
        oversample: extra sketch columns.
        n_iter: power iterations.
        compensated: take the residual against the *quantized* low-rank part, so that the
            residual carries the rounding errors of the factors too; the paper takes it against
            the exact one.
    """

    rank: int
    sample_frac: float = 0.01
    oversample: int = 8
    n_iter: int = 1
    compensated: bool = True

    def __call__(self, x, quantizer, *, dim, key, row_mask=None) -> Tensor:
        if x.numel() == 0:
            return x
        low, residual = self._split(x, quantizer, dim=dim, key=key, row_mask=row_mask)[:2]
        return quantizer(residual, dim=dim, key=key.fold(3)).to(low.dtype).add_(low)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        _, residual, a, v = self._split(x, quantizer, dim=dim, key=key, row_mask=row_mask)
        return [
            Part("a", *a),
            Part("v", *v),
            Part("residual", residual, quantizer(residual, dim=dim, key=key.fold(3))),
        ]

    def _split(self, x, quantizer, *, dim, key, row_mask):
        # x ~ a diag(lam) v^T:  v from sampled rows, a and lam by projecting every row.
        rank = min(self.rank, *x.shape)
        v = find_subspace(
            x,
            rank,
            sample_frac=self.sample_frac,
            min_rows=default_rows(rank, self.oversample),
            oversample=self.oversample,
            n_iter=self.n_iter,
            key=key,
            row_mask=row_mask,
        )  # [c k]
        x = x.to(v.dtype)
        a, lam = project(x, v)  # [t k] [k]
        # Row blocks of every part run along the dimension that the GEMM contracts.
        a_hat = quantizer(a, dim=dim, key=key.fold(1)).to(x.dtype)
        vh_hat = quantizer(v.T, dim=dim, key=key.fold(2)).to(x.dtype)
        low = (a_hat * lam) @ vh_hat  # [t k] @ [k c] -> [t c]
        exact = low if self.compensated else (a * lam) @ v.T
        return low, x - exact, (a, a_hat), (v.T, vh_hat)


def _fp32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


IDENTITY = Identity()


@dataclass(frozen=True)
class Operand:
    """A tensor on its way into a GEMM.

    Args:
        quantizer: None leaves the tensor in high precision.
        conditioner: what is done around the quantizer.
    """

    quantizer: Quantizer | None = None
    conditioner: Conditioner = IDENTITY

    def __call__(
        self,
        x: Tensor,
        *,
        dim: int,
        key: Key,
        dtype: torch.dtype,
        row_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Quantizes for a GEMM in `dtype`.

        Args:
            x: [t c]
            dim: the dimension that the GEMM contracts.

        Returns:
            (x_hat [t c] in `dtype`, scale): the operand is x_hat * scale, perhaps padded along
            `dim`. scale is None unless `dtype` is bf16, which holds code * block scale exactly but
            not the product with the fp32 tensor scale; the GEMM then scales its output.
        """
        if self.quantizer is None:
            return x.to(dtype), None
        direct = isinstance(self.conditioner, Identity)  # a copied or unpickled one too
        if dtype is torch.bfloat16 and direct and self.quantizer.two_level:
            values, scale = self.quantizer.unscaled(x, dim=dim, key=key)
            return values.to(dtype), scale
        x_hat = self.conditioner(x, self.quantizer, dim=dim, key=key, row_mask=row_mask)
        return x_hat.to(dtype), None


HIGH_PRECISION = Operand()
