"""Singular values and vectors, the elbow of a spectrum, and the spectrum that noise would have.

Singular values are the square roots of the eigenvalues of the short side's Gram matrix, all GEMM
except one tridiagonalization: in fp64 up to `EXACT_SIDE` on the short side, in fp32 above it. If
both sides exceed `MAX_SIDE`, rows are sampled first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metis_hf.noise import Key
from metis_hf.transforms.spectral import sample_rows

EXACT_SIDE = 1280
MAX_SIDE = 4096
_SAMPLES = 2000  # points on a spectrum's curve, evenly spaced in arc length
_SMOOTHING = 0.01  # standard deviation of the smoothing, as a share of the arc length,
_SMOOTHED_STEPS = 10  # but at least this many components: a short spectrum's steps are not elbows


def limit_rows(x: Tensor) -> Tensor:
    """Return x [t c], or `MAX_SIDE` evenly spread random rows of it if both sides exceed that."""
    return x if min(x.shape) <= MAX_SIDE else sample_rows(x, MAX_SIDE, Key(11))


@dataclass(frozen=True)
class Svd:
    """x = u diag(s) v^T with r = min(t, c) components, in fp32.

    The long side's vectors are computed on demand. The squares s^2 are off by at most about
    eps sqrt(l) s_0^2 (l the long side), so values below s_0 (eps sqrt(l))^(1/2) are lost in the
    error: above EXACT_SIDE, in fp32, below a thousandth of the largest.
    """

    x: Tensor  # [t c]
    s: Tensor  # [r], descending
    short: Tensor  # [r r] or [t r]: singular vectors of the short side, as columns

    @classmethod
    def of(cls, x: Tensor) -> Svd:
        """Decompose x [t c]."""
        x = x.detach().float()
        gram, scale = _gram(x)
        values, vectors = torch.linalg.eigh(gram)
        s = values.flip(0).clamp_min(0).sqrt() * scale
        return cls(x, s.float(), vectors.flip(1).float())

    def left(self, index: list[int] | slice) -> Tensor:
        """Return the left singular vectors [t n] of the components `index`."""
        if self.x.shape[0] <= self.x.shape[1]:
            return self.short[:, index]
        return self._unit(self.x @ self.short[:, index])

    def right(self, index: list[int] | slice) -> Tensor:
        """Return the right singular vectors [c n] of the components `index`."""
        if self.x.shape[0] > self.x.shape[1]:
            return self.short[:, index]
        return self._unit(self.x.T @ self.short[:, index])

    @staticmethod
    def _unit(columns: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(columns, dim=0)
        return columns / length.clamp_min(torch.finfo(columns.dtype).tiny)


def _gram(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x x^T or x^T x, whichever is smaller, of x / scale; scale, the largest |entry|)."""
    scale = x.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    x = (x.double() if min(x.shape) <= EXACT_SIDE else x) / scale
    return (x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x), scale


def singular_values(x: Tensor) -> Tensor:
    """Return all min(t, c) singular values of x [t c], descending, fp32; accuracy as in `Svd`."""
    gram, scale = _gram(x.detach().float())
    return (torch.linalg.eigvalsh(gram).flip(0).clamp_min(0).sqrt() * scale).float()


class LastSpectrum:
    """Caches the singular values of the last matrix, since consecutive layers share their input.

    It holds a reference to that matrix, so that its memory cannot be reused for another.
    """

    def __init__(self) -> None:
        self._x: Tensor | None = None
        self._version = -1
        self._sigma = torch.empty(0)

    def of(self, x: Tensor) -> Tensor:
        """Return the singular values of x [t c], of `limit_rows(x)` if x is large."""
        last = self._x
        same = last is not None and last.data_ptr() == x.data_ptr() and last.shape == x.shape
        if not same or self._version != x._version:
            self._x, self._version = x, x._version
            self._sigma = singular_values(limit_rows(x))
        return self._sigma


def elbow(values: Tensor | np.ndarray) -> int | None:
    """Return the elbow k*: the index of greatest curvature of a descending spectrum [r].

    The curve is (i / (r - 1), (s_i - s_last) / (s_0 - s_last)), both axes from 0 to 1, as a polygon
    sampled evenly in arc length and smoothed by a Gaussian of 1 % of its length, or of 10
    components if that is more. k* is the index nearest the point of greatest curvature, among the
    points where the curve gets flatter; k* components lie left of it. arXiv 2509.00404 ("index of
    maximum curvature") specifies neither axes nor smoothing; both are our choice.

    Returns:
        1 <= k* < r; None without a bend: fewer than 4 values, a straight line, all equal.
    """
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 4 or not np.isfinite(y).all() or y[0] - y[-1] <= 1e-6 * abs(y[0]):
        return None
    y = (y - y[-1]) / (y[0] - y[-1])
    x = np.linspace(0, 1, len(y))
    arc = np.concatenate([[0], np.hypot(np.diff(x), np.diff(y)).cumsum()])
    even = np.linspace(0, arc[-1], _SAMPLES)
    width = max(_SMOOTHING, _SMOOTHED_STEPS / (len(y) - 1) / arc[-1]) * _SAMPLES
    width = min(width, _SAMPLES / 8)  # room for the reflection at the ends
    x_s, y_s = (_smooth(np.interp(even, arc, axis), width) for axis in (x, y))
    dx, dy = np.gradient(x_s), np.gradient(y_s)
    turn = dx * np.gradient(dy) - dy * np.gradient(dx)  # > 0: the curve gets flatter
    curvature = turn / np.hypot(dx, dy).clip(1e-12) ** 3
    best = int(curvature.argmax())
    if curvature[best] * _SAMPLES < 1e-3:
        return None
    return int(np.clip(round(float(x_s[best]) * (len(y) - 1)), 1, len(y) - 1))


def _smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Smooth with a Gaussian; point reflection pads the ends and keeps their slope."""
    reach = int(4 * width)
    offsets = np.arange(-reach, reach + 1)
    kernel = np.exp(-0.5 * (offsets / width) ** 2)
    left = 2 * values[0] - values[reach:0:-1]
    right = 2 * values[-1] - values[-2 : -reach - 2 : -1]
    return np.convolve(np.concatenate([left, values, right]), kernel / kernel.sum(), "valid")


def noise_spectrum(rows: int, columns: int, energy: float) -> np.ndarray:
    """Return the singular values of independent normal entries (Marchenko-Pastur quantiles).

    The result [min(rows, columns)] is descending, and its squares sum to `energy`.
    """
    small, large = sorted((rows, columns))
    beta = small / large
    angle = (np.arange(20000) + 0.5) * np.pi / 20000
    squares = 1 + beta + 2 * np.sqrt(beta) * np.cos(angle)  # descending from (1 + sqrt(beta))^2
    above = (np.sin(angle) ** 2 / squares).cumsum()
    quantiles = np.interp((np.arange(small) + 0.5) / small, above / above[-1], squares)
    return np.sqrt(quantiles * energy / quantiles.sum())


def spectrum_data(values: Tensor, shape: Sequence[int]) -> dict:
    """Return a spectrum with its elbow, and the same for noise, as JSON data for figures.

    Returns:
        sigma [r]; rank r; elbow k*; fraction k*/r; energy, the first k* components' share of
        sum(s^2); all but rank also under noise_*, for independent normal entries of the same shape
        and norm.
    """
    sigma = values.double().numpy()
    rows, columns = shape
    noise = noise_spectrum(rows, columns, energy=float(np.square(sigma).sum()))
    data: dict = {"rank": len(sigma), "sigma": sigma.tolist(), "noise_sigma": noise.tolist()}
    for prefix, curve in (("", sigma), ("noise_", noise)):
        found, squares = elbow(curve), np.square(curve)
        data[f"{prefix}elbow"] = found
        data[f"{prefix}fraction"] = None if found is None else found / len(curve)
        share = squares[:found].sum() / squares.sum()
        data[f"{prefix}energy"] = None if found is None else float(share)
    return data
