"""Alignment of a sample's dominant subspace (few rows or sequences) with the whole batch's."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from metis_hf.noise import key_of
from metis_hf.noise import uniform as noise_uniform
from metis_hf.transforms.spectral import dominant_subspace

RATIOS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
DRAWS = 8
_EXACT_COLUMNS = 1024


def subspace(x: Tensor, rank: int) -> Tensor:
    """Return the `rank` leading right singular vectors [c k] of x [t c]; fewer if x has lower rank.

    Up to 1024 columns: exact, from the fp64 Gram matrix. Above: randomized, with max(16, rank)
    extra directions and eight power iterations, which a flat spectrum needs.
    """
    rank = min(rank, *x.shape)
    if x.shape[1] > _EXACT_COLUMNS:
        return dominant_subspace(x, rank, oversample=max(16, rank), n_iter=8)
    x = x.double()
    x = x / x.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    wide = x.shape[0] < x.shape[1]
    gram = (x @ x.T if wide else x.T @ x).numpy()
    leading = (len(gram) - rank, len(gram) - 1)  # a third of the time for all eigenvectors
    values, columns = scipy.linalg.eigh(gram, subset_by_index=leading, driver="evr")
    floor = values[-1] * np.finfo(np.float64).eps * max(x.shape)
    rank = min(rank, int((values > floor).sum()))
    vectors = torch.from_numpy(columns[:, ::-1][:, :rank].copy())
    return torch.linalg.qr(x.T @ vectors).Q if wide else vectors


def mean_squared_correlation(a: Tensor, b: Tensor) -> float:
    """Return the mean squared cosine of the principal angles: |a^T b|_F^2 / k, 0 to 1.

    a [c k], the reference subspace, and b [c n] have orthonormal columns; n < k counts the missing
    directions as 0.
    """
    product = a.double().T @ b.double()
    return float(product.square().sum() / a.shape[1])


def pick(count: int, total: int, *parts: int | str) -> Tensor:
    """Return `count` of `total` indices without repetition; `parts` make the noise key."""
    return noise_uniform((total,), key_of("alignment", *parts)).argsort(stable=True)[:count]


def alignment_data(x: Tensor, rank: int, length: int | None) -> dict:
    """Return the alignment as a function of the sample ratio, for rows and for whole sequences.

    Args:
        x: [t c], concatenated sequences of `length` rows.
        rank: k, dimension of the dominant subspace.
        length: rows per sequence; None: the rows do not form sequences.

    Returns:
        rank, rows; under "by_row" the lists ratio (count / total), count, and mean, low and high
        over the draws. Ratios below one row are skipped. With sequences also "sequences" and
        "by_sequence", in the same format.
    """
    rank = min(rank, *x.shape)
    whole = subspace(x, rank)
    data: dict = {"rank": rank, "rows": x.shape[0]}
    units = {"row": 1}
    if length is not None:
        data["sequences"] = x.shape[0] // length
        units["sequence"] = length
    for unit, size in units.items():
        total = x.shape[0] // size
        blocks = x[: total * size].view(total, size, -1)
        points = []
        for count in sorted({round(ratio * total) for ratio in RATIOS} - {0}):
            draws = []
            for draw in range(DRAWS if count < total else 1):
                few = blocks[pick(count, total, unit, count, draw)].flatten(0, 1)
                draws.append(mean_squared_correlation(whole, subspace(few, rank)))
            mean = sum(draws) / len(draws)
            points.append((count / total, float(count), mean, min(draws), max(draws)))
        columns = map(list, zip(*points))
        data[f"by_{unit}"] = dict(zip(("ratio", "count", "mean", "low", "high"), columns))
    return data


def at_ratio(curve: dict[str, list[float]], ratio: float) -> float:
    """Return the mean alignment at a sample ratio, by linear interpolation in its logarithm."""
    if not curve["ratio"] or ratio < curve["ratio"][0]:
        return float("nan")
    return float(np.interp(np.log(ratio), np.log(curve["ratio"]), curve["mean"]))
