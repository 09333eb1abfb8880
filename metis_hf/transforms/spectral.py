"""Spectral split: a matrix as a thin dominant part plus a residual (arXiv 2509.00404, section 3).

Activations and gradients: the dominant right subspace is estimated from a few sampled rows, or from
a few sums of rows; the whole matrix is then projected onto it. Weights: a full SVD, or for large
weights the same method with every row, more power iterations and an exact SVD of the thin part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from metis_hf.noise import Key, uniform
from metis_hf.numerics.kernels.choice import kernels_for
from metis_hf.numerics.kernels.layout import DTYPES
from metis_hf.numerics.kernels.request import or_reference
from metis_hf.transforms.orthogonal import LIMITS, WIDEST_BLOCK, next_basis
from metis_hf.transforms.products import project

_DEFAULT_KEY = Key(0)


class SpectralSplit(NamedTuple):
    """A split matrix: x = (u * s) @ vh + residual."""

    u: Tensor  # [t k] unit columns
    s: Tensor  # [k] >= 0, descending
    vh: Tensor  # [k c] orthonormal rows
    residual: Tensor  # [t c]


def sample_rows(x: Tensor, count: int, key: Key, row_mask: Tensor | None = None) -> Tensor:
    """Pick `count` rows of `x`, one at random from each of `count` equal stretches.

    Args:
        x: [t c]
        count: rows to pick; all of them, in order, if there are no more than that.
        key: noise key.
        row_mask: [t] bool; rows with False (padding) are never picked. If every row is False,
            the mask is ignored.

    Returns:
        [min(count, t) c]. If the mask leaves fewer than `count` rows, rows repeat; if `count` >= t,
        masked rows are zero.
    """
    t = x.shape[0]
    if row_mask is None:
        if count >= t:
            return x
        starts = torch.arange(count, device=x.device, dtype=torch.float64)
        picks = (starts + uniform((count,), key, x.device)) * (t / count)
        return x.index_select(0, picks.long().clamp_(max=t - 1))
    # Stretches of the kept rows only, counted by a running sum: no host synchronization.
    mask = row_mask | ~row_mask.any()
    if count >= t:
        return torch.where(mask[:, None], x, torch.zeros_like(x))
    position = mask.to(torch.int64).cumsum(0)
    starts = torch.arange(count, device=x.device, dtype=torch.float64)
    picks = (starts + uniform(starts.shape, key, x.device)) * (position[-1] / starts.numel())
    picks = picks.floor().to(torch.int64).clamp_(max=position[-1] - 1) + 1
    return x.index_select(0, torch.searchsorted(position, picks))


def sum_rows(x: Tensor, count: int, key: Key, row_mask: Tensor | None = None) -> Tensor:
    """Add the rows of `x`, with random signs, into `count` sums or a few more.

    Each row is in exactly one sum. The mean over keys of the sums' Gram matrix is the Gram matrix
    of x (CountSketch: Charikar, Chen, Farach-Colton, 2002; for subspaces Clarkson and Woodruff,
    arXiv 1207.6365). The sums therefore capture a direction in which only a few rows are large,
    which sampled rows miss.

    The rows are cut into g stretches of n. A sum takes one row from each stretch, after a random
    cyclic shift of the stretch. The shifts spread the first tokens of sequences, often far larger
    than others, over the sums for any sequence length; and padding leaves few sums empty.

    Args:
        x: [t c]
        count: minimum number of sums; if t < 2 `count`, the rows themselves are returned.
        key: noise key.
        row_mask: [t] bool; rows with False (padding) count as zero. If every row is False, the
            mask is ignored.

    Returns:
        [n c] in the dtype of `x` (fp32 for fp16); n = ceil(t / g) with g = floor(t / count). If
        g < 2, `x` with zeros for masked rows.
    """
    t = x.shape[0]
    mask = None if row_mask is None else row_mask | ~row_mask.any()
    sums = sum_count(t, count)
    if sums == t:
        return x if mask is None else torch.where(mask[:, None], x, torch.zeros_like(x))
    x = x.detach()
    if x.dtype in DTYPES and sums * (t // count + 1) < 2**31 and kernels_for(x) == "triton":
        from metis_hf.numerics.kernels import triton_sums

        with or_reference:
            return triton_sums.sum_rows(x, sums, t // count, key.fold(1), key, mask)
    stretch = torch.arange(t // count, device=x.device)  # [g]
    shift = (uniform(stretch.shape, key.fold(1), x.device) * sums).long()
    row = (torch.arange(sums, device=x.device)[:, None] + shift) % sums + stretch * sums  # [n g]
    chance = uniform(row.shape, key, x.device)
    sign = torch.where(chance < 0.5, -1.0, torch.ones_like(chance))
    taken = row < t
    if mask is not None:
        taken = taken & mask[row.clamp(max=t - 1)]
    # 0 * NaN is NaN, so a zero weight does not drop a row: where a stretch has no row for a sum,
    # the sum repeats one of its own rows with weight 0 (an unmasked row if it has none).
    own = row.gather(1, taken.int().argmax(1, keepdim=True))
    if mask is not None:
        own = torch.where(taken.any(1, keepdim=True), own, mask.int().argmax())
    sign, row = torch.where(taken, sign, 0.0), torch.where(taken, row, own)
    x = x.float() if x.dtype is torch.float16 else x  # sums exceed its range
    return embedding_bag(row, x, mode="sum", per_sample_weights=sign.to(x.dtype))


def sum_count(t: int, count: int) -> int:
    """Return the number of sums that `sum_rows` makes of t rows; t if it returns the rows."""
    group = t // count
    return t if group < 2 else -(-t // group)


def dominant_subspace(
    sample: Tensor,
    rank: int,
    *,
    oversample: int = 8,
    n_iter: int = 2,
    key: Key = _DEFAULT_KEY,
) -> Tensor:
    """Return the leading right singular vectors of a sample (randomized SVD).

    Halko, Martinsson, Tropp (arXiv 0909.4061), algorithms 4.4 and 5.1. The host waits for the
    device, unlike in `dominant_basis`. Entries that are not finite count as zero.

    Args:
        sample: [n c]
        rank: k, at most min(n, c).
        oversample: extra sketch columns, dropped at the end.
        n_iter: power iterations, each a product with the Gram matrix of the sample.
        key: noise key of the sketch.

    Returns:
        [c k], fp32 (fp64 for an fp64 sample), columns ordered by decreasing singular value.
    """
    sample = _in_range(sample)
    basis = _power_basis(sample, min(rank + oversample, *sample.shape), n_iter, key)  # [w c]
    vh = torch.linalg.svd(sample @ basis.T, full_matrices=False).Vh  # [w w]
    return (vh[:rank] @ basis).T


def dominant_basis(
    sample: Tensor,
    rank: int,
    *,
    n_iter: int = 2,
    key: Key = _DEFAULT_KEY,
    start: Tensor | None = None,
) -> Tensor:
    """Return an orthonormal basis close to the leading right singular subspace, in no order.

    Subspace iteration (Halko, Martinsson, Tropp, arXiv 0909.4061, algorithm 4.4): a sketch of
    exactly `rank` columns, `n_iter` products with the Gram matrix of the sample, and a Cholesky QR
    after the sketch and after each product. No eigenvalue problem follows, and the host does not
    wait for the device. A split is exact in any basis, and bases of the same span give rounding
    errors of the same size. Rounding leaves the basis off orthonormality by about 1e-6. Non-finite
    entries count as zero here, so that the basis stays usable; they show up in the projection. If
    the sample lacks rank, arbitrary directions fill in.

    Args:
        sample: [n c]
        rank: k, at most min(n, c).
        n_iter: products with the Gram matrix.
        key: noise key of the sketch.
        start: [c k], a basis to begin with instead of a random sketch, such as the previous step's;
            n_iter must then be at least 1. Columns of zeros become arbitrary directions.

    Returns:
        [c k], fp32 (fp64 for an fp64 sample).
    """
    if start is not None:
        dtype = torch.promote_types(sample.dtype, torch.float32)
        start = torch.empty(start.T.shape, dtype=dtype, device=start.device).copy_(start.T)
        start.diagonal().add_(2.0**-20)
    if sample.dtype in DTYPES and rank <= WIDEST_BLOCK and kernels_for(sample) == "triton":
        from metis_hf.numerics.kernels import triton_basis

        limits = triton_basis.Limits(*LIMITS)
        with or_reference:
            return triton_basis.dominant_basis(sample, rank, n_iter, key, start, limits).T
    sample = _in_range(sample)
    if start is None:
        return _power_basis(sample, rank, n_iter, key).T
    return _powers(sample, start, n_iter).T


def _in_range(sample: Tensor) -> Tensor:
    """Scale the sample to a largest magnitude of 1, fp32 or fp64, with 0 for non-finite entries.

    Products of huge or tiny values must not leave the fp32 range.
    """
    dtype = torch.float64 if sample.dtype is torch.float64 else torch.float32
    sample = sample.detach().to(dtype)
    largest = _amax(sample)
    # All entries are finite if the largest is; only on a CPU is reading it free.
    if kernels_for(sample) != "compiled" or not largest.isfinite():
        sample = torch.nan_to_num(sample, nan=0.0, posinf=0.0, neginf=0.0)
        largest = _amax(sample)
    return sample / largest.clamp_min_(torch.finfo(dtype).tiny)


def _amax(x: Tensor) -> Tensor:
    least, largest = x.aminmax()
    return torch.maximum(largest, -least)


def _power_basis(sample: Tensor, width: int, n_iter: int, key: Key) -> Tensor:
    """Return an orthonormal basis [w c] of a random sketch after `n_iter` power iterations."""
    sketch = uniform((len(sample), width), key, sample.device).sub_(0.5).to(sample.dtype)  # [n w]
    basis = next_basis(sketch.T @ sample, passes=1 if n_iter else 2)
    return _powers(sample, basis, n_iter)


def _powers(sample: Tensor, basis: Tensor, n_iter: int) -> Tensor:
    """Return an orthonormal basis [w c] after `n_iter` products with the sample's Gram matrix."""
    for left in reversed(range(n_iter)):
        basis = next_basis(basis @ sample.T @ sample, basis, passes=1 if left else 2)
    return basis


def fewest_rows(rank: int, per_column: int = 4) -> int:
    """Return the least number of rows that estimate a rank-k subspace: 4 (k + 8) by default."""
    return per_column * (rank + 8)


def find_basis(
    x: Tensor,
    rank: int,
    *,
    sample_frac: float = 1.0,
    min_rows: int = 0,
    n_iter: int = 2,
    key: Key = _DEFAULT_KEY,
    row_mask: Tensor | None = None,
    summed: bool = False,
    start: Tensor | None = None,
) -> Tensor:
    """Find a basis [c k] close to the dominant right subspace of `x` [t c], for a split.

    Applies `dominant_basis` to sampled rows (`sample_rows`) or, if `summed`, to sums of rows
    (`sum_rows`).
    """
    if torch.compiler.is_compiling():  # one node of the graph
        given = x, rank, sample_frac, min_rows, n_iter, key.static, key.data
        return _basis_in_graph(*given, row_mask, summed, None if start is None else start.T).T
    count = _sample_size(x, rank, sample_frac, min_rows)
    sample = (sum_rows if summed else sample_rows)(x, count, key.fold(4), row_mask)
    return dominant_basis(sample, rank, n_iter=n_iter, key=key.fold(5), start=start)


@torch.library.custom_op("metis_hf::find_basis", mutates_args=())
def _basis_in_graph(
    x: Tensor,
    rank: int,
    sample_frac: float,
    min_rows: int,
    n_iter: int,
    static: int,
    data: Tensor | None,
    row_mask: Tensor | None,
    summed: bool,
    start: Tensor | None,
) -> Tensor:
    """Compute `find_basis`, transposed to [k c]."""
    options: dict[str, Any] = {"sample_frac": sample_frac, "min_rows": min_rows, "n_iter": n_iter}
    options |= {"row_mask": row_mask, "summed": summed}
    options["start"] = None if start is None else start.T
    return find_basis(x, rank, key=Key(static, data), **options).T.contiguous()


@_basis_in_graph.register_fake
def _(x, rank, sample_frac, min_rows, n_iter, static, data, row_mask, summed, start):  # type: ignore[no-untyped-def]
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((rank, x.shape[1]), dtype=dtype)


def _sample_size(x: Tensor, rank: int, sample_frac: float, min_rows: int) -> int:
    return max(int(sample_frac * x.shape[0] + 0.999999), min_rows, rank)


def spectral_split(
    x: Tensor,
    rank: int,
    *,
    sample_frac: float = 1.0,
    min_rows: int = 0,
    oversample: int = 8,
    n_iter: int = 2,
    key: Key = _DEFAULT_KEY,
    row_mask: Tensor | None = None,
) -> SpectralSplit:
    """Split x [t c] into (u * s) @ vh + residual (eq. "X = A Lambda B^T + X_R").

    The subspace comes from sampled rows; every row is then projected onto it, so the split is exact
    whichever rows were sampled. With `sample_frac=1` and full rank it is the SVD.

    Args:
        x: [t c], any float dtype.
        rank: k, the number of directions kept.
        sample_frac: share of rows that the subspace is estimated from.
        min_rows: minimum number of these rows.
        oversample: extra columns of the sketch.
        n_iter: power iterations.
        key: noise key of sampling and sketch; equal keys give equal results.
        row_mask: [t] bool, False for rows (padding) that must not be sampled.

    Returns:
        u [t k], s [k], vh [k c], residual [t c], in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: `x` is not a matrix, or `rank` is not between 1 and min(t, c).
    """
    if x.dim() != 2:
        raise ValueError(f"spectral_split needs a matrix [t c], got shape {tuple(x.shape)}")
    if not 1 <= rank <= min(x.shape):
        raise ValueError(
            f"rank={rank} is out of range for a {x.shape[0]} x {x.shape[1]} matrix; "
            f"choose 1 to {min(x.shape)}"
        )
    if not 0 < sample_frac <= 1:
        raise ValueError(
            f"sample_frac={sample_frac} is out of range; choose a value above 0 and at most 1"
        )
    with torch.autocast(x.device.type, enabled=False):
        count = _sample_size(x, rank, sample_frac, min_rows)
        sample = sample_rows(x, count, key.fold(4), row_mask)
        v = dominant_subspace(sample, rank, oversample=oversample, n_iter=n_iter, key=key.fold(5))
        x = x.detach().to(v.dtype)
        u, s = project(x, v)
        order = s.argsort(descending=True, stable=True)
        u, s, vh = u[:, order], s[order], v.T[order]
        return SpectralSplit(u, s, vh, x - (u * s) @ vh)


def _svd(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the thin SVD; a long matrix goes through its QR factor R, which is far faster."""
    if w.shape[0] < w.shape[1]:
        v, s, uh = _svd(w.T)
        return uh.T, s, v.T
    if w.shape[0] < 2 * w.shape[1]:
        return torch.linalg.svd(w, full_matrices=False)
    q, r = torch.linalg.qr(w)
    u, s, vh = torch.linalg.svd(r)
    return q @ u, s, vh


def decompose_weight(w: Tensor, rank: int, key: Key = _DEFAULT_KEY) -> SpectralSplit:
    """Split a weight [o i] into its rank-k SVD, exact or approximate, and the residual.

    A weight with a short side of at most 1024 gets a full SVD; a larger one the randomized range
    finder over all rows with four power iterations, then an exact SVD of the thin part. Its
    singular values are too small where the spectrum has no gap: at 1100 x 1100 by up to 5 % in a
    Gaussian matrix and 2 % where sigma_i = i^-1/2; the norm of the residual is then up to .6 %
    above the SVD's.

    Returns:
        u [o k], s [k], vh [k i] (both factors orthonormal), residual [o i]; fp32 or fp64.
    """
    dtype = torch.float64 if w.dtype is torch.float64 else torch.float32
    w = w.detach().to(dtype)
    if not torch.isfinite(w).all():
        raise ValueError("the weight has NaN or infinite entries; it cannot be decomposed")
    with torch.autocast(w.device.type, enabled=False):
        if min(w.shape) <= 1024:
            u, s, vh = _svd(w)
            u, s, vh = u[:, :rank], s[:rank], vh[:rank]
        else:
            v = dominant_subspace(w, rank, oversample=max(8, rank // 4), n_iter=4, key=key)
            u, s, rotation = torch.linalg.svd(w @ v, full_matrices=False)  # [o k] [k] [k k]
            vh = rotation @ v.T
        u, s, vh = u.contiguous(), s.contiguous(), vh.contiguous()
        return SpectralSplit(u, s, vh, w - (u * s) @ vh)
