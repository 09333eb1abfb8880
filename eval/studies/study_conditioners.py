"""Quantizers and conditioners of the studies: alternatives and additions to a split.

No scheme uses these conditioners, because they gained nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from metis_hf.numerics import Quantizer
from metis_hf.operands import Conditioner, RandomHadamard, Spectral
from metis_hf.operands.conditioners.mean import row_mean
from metis_hf.transforms.hadamard import rotate, unrotate
from metis_hf.transforms.spectral import fewest_rows, project, sample_rows

NEAREST = Quantizer(rounding="nearest", scale_rounding="nearest")
NEAREST_UP = replace(NEAREST, scale_rounding="up")
STOCHASTIC = Quantizer(rounding="stochastic", scale_rounding="up")
STOCHASTIC_NEAREST = replace(STOCHASTIC, scale_rounding="nearest")
FOUR_SIX = replace(NEAREST, scale_rule="four-over-six")
EDEN = replace(NEAREST, scale_rule="eden")
FP8 = Quantizer("fp8-e4m3", two_level=False)


@dataclass(frozen=True)
class Factors(Conditioner):
    """A split with its factors in another format, or exact if `factor` is None."""

    split: Spectral
    factor: Quantizer | None = None

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        a, lam, v = self.split.split(x, key=key, row_mask=row_mask)
        if self.factor is not None:
            a, v = self.factor(a, dim=dim, key=key), self.factor(v.T, dim=dim, key=key).T
        low = (a * lam) @ v.T
        return (low + quantizer(x - low, dim=dim, key=key.fold(3))).to(dtype)


@dataclass(frozen=True)
class MeanThenSplit(Conditioner):
    """A split of the rows minus their mean; the mean stays exact."""

    split: Spectral

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        mean = row_mean(x, row_mask)
        rest = self.split(x.float() - mean, quantizer, dim=dim, key=key, row_mask=row_mask)
        return (rest + mean).to(dtype)


@dataclass(frozen=True)
class RotatedResidual(Conditioner):
    """A split with its residual quantized in a basis rotated by a Hadamard matrix."""

    split: Spectral

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        factors = self.split.with_factors(x, quantizer, dim=dim, key=key, row_mask=row_mask)[1]
        low = factors.dense()
        residual = quantizer(rotate(x.float() - low, dim=dim, seed=0), dim=dim, key=key.fold(3))
        rotated = unrotate(residual, dim=dim, seed=0)[: x.shape[0], : x.shape[1]]
        return (low + rotated).to(dtype)


@dataclass(frozen=True)
class Eden(Conditioner):
    """MS-EDEN of a matrix, or of its split's residual, in a random basis drawn from the key."""

    split: Spectral | None = None

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        low = torch.zeros_like(x, dtype=torch.float32)
        if self.split is not None:
            options = {"dim": dim, "key": key, "row_mask": row_mask}
            low = self.split.with_factors(x, quantizer, **options)[1].dense()
        basis = RandomHadamard(seed=key.static)
        residual = basis(x.float() - low, EDEN, dim=dim, key=key.fold(3))
        return (low + residual[: x.shape[0], : x.shape[1]]).to(dtype)


@dataclass(frozen=True)
class WarmStarted(Spectral):
    """A split with the last call's subspace, moved by one power step (Dion, arXiv 2504.05295).

    v = orth(R^T R v), with R the sampled rows and no sketch. The first call finds its subspace as
    `Spectral` does.
    """

    last: list[Tensor] = field(default_factory=list, compare=False)

    def split(self, x, *, key, row_mask=None) -> tuple[Tensor, Tensor, Tensor]:
        if not self.last:
            found = super().split(x, key=key, row_mask=row_mask)
            self.last.append(found[2])
            return found
        count = max(math.ceil(self.sample_frac * len(x)), fewest_rows(self.rank))
        rows = sample_rows(x, count, key.fold(4), row_mask).float()
        self.last[:] = [torch.linalg.qr(rows.T @ (rows @ self.last[0])).Q]
        return *project(x.float(), self.last[0]), self.last[0]
