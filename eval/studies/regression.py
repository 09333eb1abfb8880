"""Least squares with Student's t intervals, for independent or clustered errors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from metis_hf.lab.compare.statistics import CONFIDENCE

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A coefficient and the half width of its interval."""

    value: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Return whether zero is outside the interval."""
        return abs(self.value) > self.half_width

    def __str__(self) -> str:
        return f"{self.value:+.3f} ± {self.half_width:.3f}"


@dataclass(frozen=True)
class Fit:
    """A least-squares fit.

    Attributes:
        coefficients: [k], in the order of the design's columns.
        covariance: [k, k] of the coefficients.
        freedom: degrees of freedom of the intervals.
        residual: standard deviation of a point around the fit, in logs.
    """

    coefficients: Array
    covariance: Array
    freedom: int
    residual: float

    def estimate(self, column: int) -> Estimate:
        """Return one coefficient with its interval."""
        error = math.sqrt(self.covariance[column, column])
        return Estimate(float(self.coefficients[column]), self._quantile * error)

    def predict(self, at: Array) -> tuple[float, float, float]:
        """Return the predicted gap of a new run at a design row [k]: middle, low and high."""
        middle = float(at @ self.coefficients)
        half = self._quantile * math.sqrt(self.residual**2 + at @ self.covariance @ at)
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)

    @property
    def _quantile(self) -> float:
        return float(stats.t.ppf((1 + CONFIDENCE) / 2, self.freedom))


def least_squares(design: Array, y: Array) -> Fit:
    """Fit y [n] by a design [n, k], with independent errors of equal variance.

    Raises:
        ValueError: too few points, or linearly dependent columns.
    """
    count, columns = design.shape
    if count <= columns or np.linalg.matrix_rank(design) < columns:
        raise ValueError(
            f"{count} points cannot fit {columns} coefficients of this design; add runs of other "
            "sizes and lengths"
        )
    coefficients = np.linalg.lstsq(design, y, rcond=None)[0]
    left = y - design @ coefficients
    variance = float(left @ left) / (count - columns)
    covariance = variance * np.linalg.inv(design.T @ design)
    return Fit(coefficients, covariance, count - columns, math.sqrt(variance))


def clustered(design: Array, y: Array, clusters: Sequence[Hashable]) -> Fit:
    """Fit as `least_squares`, but allow correlated errors of the rows of a cluster [n].

    The covariance is the cluster-robust sandwich estimator, corrected for the number of clusters.
    Intervals have one degree of freedom less than there are clusters.
    """
    found = least_squares(design, y)
    scores = design * (y - design @ found.coefficients)[:, None]
    labels = list(dict.fromkeys(clusters))
    sums = np.array([scores[[own == label for own in clusters]].sum(0) for label in labels])
    half = sums @ np.linalg.inv(design.T @ design)
    (count, columns), groups = design.shape, len(labels)
    correction = groups / (groups - 1) * (count - 1) / (count - columns)
    return replace(found, covariance=correction * half.T @ half, freedom=groups - 1)
