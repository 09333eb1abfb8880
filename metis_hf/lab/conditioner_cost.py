"""The cost of conditioners on hardware: FLOPs from a matrix to its codes, by class."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import singledispatch

import torch

from metis_hf.operands import (
    Clamped,
    Conditioner,
    FullHadamard,
    Hadamard,
    HotChannels,
    MeanRemoved,
    RandomHadamard,
    RandomKronecker,
    Requantized,
    Spectral,
)
from metis_hf.transforms.hadamard import SIZE, group_size, padded_shape
from metis_hf.transforms.rotation import rotation_of
from metis_hf.transforms.spectral import fewest_rows, sum_count

Shape = tuple[int, int]


@dataclass(frozen=True)
class ConditionerCost:
    """Work of a conditioner on a matrix [t c]."""

    encode: Mapping[str, float] = field(default_factory=dict)  # FLOPs before quantizing, by kind
    low_rank: int = 0  # rank of the part that a GEMM of FP4 codes multiplies separately
    channels: int = 0  # channels that are quantized twice; the GEMM has as many more
    sparse: int = 0  # upper bound on the elements that a GEMM multiplies one by one
    rotated: tuple[Hashable, int] | None = None  # (name of the rotation, dimension)


@singledispatch
def conditioner_cost(conditioner: Conditioner, shape: Shape, dim: int) -> ConditionerCost:
    """Return the cost of a conditioner on a matrix of this shape; the GEMM contracts `dim`.

    A conditioner that multiplies nothing, or whose class is not registered, costs nothing.
    Register your own class with `@conditioner_cost.register(YourConditioner)`.
    """
    return ConditionerCost()


@conditioner_cost.register
def _(conditioner: Hadamard, shape, dim):
    """Count one product with a 16 x 16 matrix per block of 16."""
    flops = 2.0 * SIZE * shape[0] * shape[1]
    return ConditionerCost({"rotation": flops}, rotated=(conditioner, dim % 2))


@conditioner_cost.register
def _(conditioner: RandomHadamard, shape, dim):
    rows, columns = padded_shape(shape, dim=dim)
    flops = 2.0 * rows * columns * group_size(shape[dim])
    return ConditionerCost({"rotation": flops}, rotated=(conditioner, dim % 2))


@conditioner_cost.register(FullHadamard)
@conditioner_cost.register(RandomKronecker)
def _(conditioner, shape, dim):
    kind, seed, axis = conditioner.kind, conditioner.seed, (dim + conditioner.across) % 2
    flops = rotation_of(kind, shape[axis], seed, torch.empty(0)).flops(shape[1 - axis])
    return ConditionerCost({"rotation": flops}, rotated=((kind, seed), axis))


@conditioner_cost.register
def _(conditioner: HotChannels, shape, dim):
    return ConditionerCost(channels=conditioner.channels(shape[dim]))


@conditioner_cost.register
def _(conditioner: Clamped, shape, dim):
    return ConditionerCost(sparse=2 * conditioner.outliers(shape[0] * shape[1]))


@conditioner_cost.register
def _(conditioner: MeanRemoved, shape, dim):
    inner = conditioner_cost(conditioner.inner, shape, dim)
    return ConditionerCost(inner.encode, low_rank=1, rotated=inner.rotated)


@conditioner_cost.register
def _(conditioner: Requantized, shape, dim):
    return conditioner_cost(conditioner.second, shape, dim)


@conditioner_cost.register
def _(conditioner: Spectral, shape, dim):
    """Count the range finder on rows or sums of rows, then the projection of every row.

    With n sampled rows or sums of rows, rank k and p power iterations (Halko, Martinsson, Tropp,
    arXiv 0909.4061, algorithm 4.4), the sketch takes 2nck and each iteration 4nck. Each basis [k c]
    is factorized as in `transforms.orthogonal`, the last one twice: 3ck^2 for Gram matrix and
    triangular solve, k^3/3 for the Cholesky factor. All t rows then take 2tck for the projection,
    2tck for the low-rank part, and 2tc for subtraction and addition. A kept basis is found once
    per `subspace_interval` steps; in the other steps each refinement is an iteration without a
    sketch.
    """
    t, c = shape
    k = min(conditioner.rank, t, c)
    n = _sample_size(conditioner, t, k)
    p, one_basis = conditioner.n_iter, 3.0 * c * k * k + k**3 / 3
    subspace, factorization = 2.0 * n * c * k * (1 + 2 * p), (p + 2) * one_basis
    if conditioner.reuse is not None:
        share, p = 1 / conditioner.reuse.interval, conditioner.reuse.refinements
        products = 4.0 * n * c * k * p
        bases = (p + 1) * one_basis if p else 0.0
        subspace = share * subspace + (1 - share) * products
        factorization = share * factorization + (1 - share) * bases
    encode = {
        "subspace": subspace,
        "factorization": factorization,
        "projection": 2.0 * t * c * k,
        "low_rank": 2.0 * t * c * k + 2.0 * t * c,
    }
    return ConditionerCost(encode, low_rank=k)


def _sample_size(conditioner: Spectral, t: int, k: int) -> int:
    """Return the number of rows, or sums of rows, of t that the range finder for rank k reads."""
    rows = max(int(conditioner.sample_frac * t + 0.999999), fewest_rows(k, conditioner.rows), k)
    return sum_count(t, rows) if conditioner.summed else min(rows, t)
