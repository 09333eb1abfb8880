"""The cost of conditioners on hardware: multiply-adds from a matrix to its codes, by class."""

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
from metis_hf.transforms.spectral import fewest_rotations, fewest_rows, sum_count

Shape = tuple[int, int]


@dataclass(frozen=True)
class ConditionerCost:
    """Work of a conditioner on a matrix [t c]."""

    encode: Mapping[str, float] = field(default_factory=dict)  # FLOPs until it quantizes, by kind
    low_rank: int = 0  # rank of a part that a GEMM of FP4 codes has to multiply apart
    channels: int = 0  # that are quantized twice, and so are as many more channels of a GEMM
    sparse: int = 0  # elements that a GEMM multiplies apart, one by one, at most
    rotated: tuple[Hashable, int] | None = None  # (name of the rotation, dimension)


@singledispatch
def conditioner_cost(conditioner: Conditioner, shape: Shape, dim: int) -> ConditionerCost:
    """Count a conditioner on a matrix of this shape whose dimension `dim` the GEMM contracts.

    A conditioner that multiplies nothing, or whose class is unknown here, costs nothing. For a
    class of your own: `@conditioner_cost.register(YourConditioner)`.
    """
    return ConditionerCost()


@conditioner_cost.register
def _(conditioner: Hadamard, shape, dim):
    """Every block of 16 is multiplied by a 16 x 16 matrix."""
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

    n sampled rows or sums of rows, sketch width w, rank k, p power iterations (Halko, Martinsson,
    Tropp, arXiv 0909.4061, algorithms 4.4 and 5.1): sketch 2ncw; each iteration 4ncw; thin 2ncw,
    made orthonormal nw^2, its Gram 2nw^2; rotation kw^2 + 2cwk. Factorizations, as in
    `transforms.orthogonal`: Gram and triangular solve of each basis [w c] 3cw^2, the Gram of the
    last again; eigenvectors: a basis of a Gram matrix 3w^3, each rotation four products and a solve
    9w^3, the values 2w^3; a Cholesky factor w^3/3. Then all t rows: projection 2tck, low-rank part
    2tck, subtraction and addition.

    Without extra columns w = k, and there is no thin matrix, eigenproblem or rotation: the last
    basis is made orthonormal once more, 3ck^2. A kept basis (`subspace_interval`) is found in one
    of that many steps; in the others each refinement is an iteration without a sketch.
    """
    t, c = shape
    k = min(conditioner.rank, t, c)
    n = _sample_size(conditioner, t, k, conditioner.oversample)
    w = min(k + conditioner.oversample, n, c)
    p, turns = conditioner.n_iter, fewest_rotations(w)
    subspace, factorization = 2.0 * n * c * w * (1 + 2 * p), (p + 1) * 3.0 * c * w * w
    if conditioner.oversample:
        subspace += 2.0 * n * c * w + 3.0 * n * w * w + (w + 2.0 * c) * w * k
        factorization += 2.0 * c * w * w + (3.0 + 9.0 * turns + 2.0) * w**3
        factorization += (p + 3 + turns) * w**3 / 3
    else:
        factorization += 3.0 * c * w * w + (p + 2) * w**3 / 3
    if conditioner.reuse is not None:
        share, p = 1 / conditioner.reuse.interval, conditioner.reuse.refinements
        products = 4.0 * _sample_size(conditioner, t, k, 0) * c * k * p
        bases = (p + 1) * (3.0 * c * k * k + k**3 / 3) if p else 0.0
        subspace = share * subspace + (1 - share) * products
        factorization = share * factorization + (1 - share) * bases
    encode = {
        "subspace": subspace,
        "factorization": factorization,
        "projection": 2.0 * t * c * k,
        "low_rank": 2.0 * t * c * k + 2.0 * t * c,
    }
    return ConditionerCost(encode, low_rank=k)


def _sample_size(conditioner: Spectral, t: int, k: int, oversample: int) -> int:
    """Return the rows, or sums of rows, of t that a subspace of k directions is found from."""
    rows = max(
        int(conditioner.sample_frac * t + 0.999999), fewest_rows(k, oversample, conditioner.rows), k
    )
    return sum_count(t, rows) if conditioner.summed else min(rows, t)
