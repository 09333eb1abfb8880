"""Statistics of a variant over seeds: mean, spread, and the paired difference to the control.

Runs of one seed share initialization and data order with the control's run of that seed, so their
difference has less noise than either loss; the interval is Student's t interval of those
differences. No run is dropped: a diverged seed (NaN or infinite loss) makes the variant's mean NaN
and is named.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from metis_hf.lab.compare.results import SchemeResult
from metis_hf.schemes import CONTROL

CONFIDENCE = 0.95
K = TypeVar("K")


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    half_width: float  # half the width of the interval around `mean`; NaN for a single value
    count: int  # number of values

    @property
    def excludes_zero(self) -> bool:
        """Return whether zero lies outside the interval; False if the interval is unknown."""
        return abs(self.mean) > self.half_width


def t_interval(values: Sequence[float]) -> Interval:
    """Return Student's t interval of the mean of independent normal values."""
    count = len(values)
    if not values or not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan, count)
    mean = statistics.fmean(values)
    if count == 1:
        return Interval(mean, math.nan, 1)
    width = _t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, width, count)


def _t_quantile(freedom: int) -> float:
    """Return t such that Student's distribution has probability CONFIDENCE between -t and t.

    Inverts Abramowitz and Stegun 26.7.3 and 26.7.4 by bisection, since scipy may not be installed.
    """
    low, high = 0.0, math.pi / 2  # angles with tangent t / sqrt(freedom)
    while low < (angle := (low + high) / 2) < high:
        term, total = (math.cos(angle), 0.0) if freedom % 2 else (1.0, 0.0)
        for i in range(freedom % 2 + 1, freedom, 2):
            total += term
            term *= i / (i + 1) * math.cos(angle) ** 2
        total *= math.sin(angle)
        share = 2 / math.pi * (angle + total) if freedom % 2 else total
        low, high = (angle, high) if share < CONFIDENCE else (low, angle)
    return math.tan(angle) * math.sqrt(freedom)


def gaps_percent(losses: Mapping[K, float], base: Mapping[K, float]) -> dict[K, float]:
    """Return the gap of `losses` above `base`, in percent of `base`, for each key of both.

    A gap is NaN if either loss is not finite.
    """
    finite = math.isfinite
    return {
        key: 100 * (loss / base[key] - 1) if finite(loss) and finite(base[key]) else math.nan
        for key, loss in losses.items()
        if key in base
    }


@dataclass(frozen=True)
class Summary:
    """One variant over its seeds."""

    name: str  # of the variant
    losses: dict[int, float]  # seed -> held-out loss, nats per token
    mean: float  # of the losses; NaN if a seed diverged
    deviation: float  # sample standard deviation of the losses; NaN for a single seed
    # Paired difference to the control, percent of the control's loss; None for the control itself
    # or without one.
    gap: Interval | None
    # The same difference to the plan's reference; None for the reference itself, for the control,
    # or without a reference.
    above_reference: Interval | None
    # `gap` of the same models with their quantizers off: the lasting effect of low-bit training on
    # the weights. Also None if not measured.
    gap_dense: Interval | None
    diverged: tuple[int, ...]  # seeds whose loss is not finite
    tasks: dict[str, float]  # task -> mean of its metric over the seeds
    average: float  # over the tasks scored by a share of right answers; NaN without any
    seconds_per_step: float  # median over the seeds
    peak_memory: int  # bytes; the largest of the seeds
    # Multiply-adds beyond the three GEMMs on FP4 hardware, in % of theirs (see `cost.overhead`);
    # NaN if not counted.
    extra: float = math.nan
    not_shares: tuple[str, ...] = ()  # tasks without a share of right answers, shown unscaled


def summarize(
    results: Sequence[SchemeResult],
    reference: str | None = None,
    extra: Mapping[str, float] | None = None,
) -> list[Summary]:
    """Return a summary of each variant, in the order of first appearance.

    `reference` is a variant that the others are compared with, in addition to the control; `extra`
    has each variant's `Summary.extra`.
    """
    by_name: dict[str, list[SchemeResult]] = {}
    for result in results:
        by_name.setdefault(result.scheme, []).append(result)
    base = {result.seed: result.loss for result in by_name.get(CONTROL, [])}
    other = {result.seed: result.loss for result in by_name.get(reference or "", [])}
    return [
        _summary(
            name,
            runs,
            {} if name == CONTROL else base,
            {} if name in (CONTROL, reference) else other,
            (extra or {}).get(name, math.nan),
        )
        for name, runs in by_name.items()
    ]


def _paired(losses: dict[int, float], base: dict[int, float]) -> Interval | None:
    """Return the paired gap of `losses` above `base` in %; None without a common seed."""
    gaps = gaps_percent(losses, base)
    return t_interval(list(gaps.values())) if gaps else None


def _summary(
    name: str,
    runs: Sequence[SchemeResult],
    base: dict[int, float],
    reference: dict[int, float],
    extra: float,
) -> Summary:
    losses = {run.seed: run.loss for run in runs}
    values = list(losses.values())
    finite = all(map(math.isfinite, values))
    dense = {r.seed: x for r in runs if (x := r.loss_dense) is not None}
    tasks = {
        task: statistics.fmean(run.tasks[task]["value"] for run in runs)
        for task in runs[0].tasks
        if all(task in run.tasks for run in runs)
    }
    others = {task for run in runs for task in tasks if not run.tasks[task].get("share", True)}
    shares = [value for task, value in tasks.items() if task not in others]
    return Summary(
        name=name,
        losses=losses,
        mean=statistics.fmean(values) if finite else math.nan,
        deviation=statistics.stdev(values) if finite and len(values) > 1 else math.nan,
        gap=_paired(losses, base),
        above_reference=_paired(losses, reference),
        gap_dense=_paired(dense, base) if dense else None,
        diverged=tuple(seed for seed, loss in losses.items() if not math.isfinite(loss)),
        tasks=tasks,
        average=statistics.fmean(shares) if shares else math.nan,
        seconds_per_step=statistics.median(run.seconds_per_step for run in runs),
        peak_memory=max(run.peak_memory for run in runs),
        extra=extra,
        not_shares=tuple(sorted(others)),
    )
