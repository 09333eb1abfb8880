"""Results of an evaluation, and which of its metrics a table shows. No lm_eval in here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What a table shows where it is not plain accuracy.
HEADLINE_METRICS = {
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    # Likelihood relative to the choice without context: a small model's likelihoods vary more
    # between texts than between contexts.
    "demo_choice": "acc_mutual_info",
}


def metrics_of(values: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the metrics among lm-eval's values of one task.

    Args:
        values: `"<metric>,<filter>"` and `"<metric>_stderr,<filter>"`, besides "alias"
            and the like; of several filters the first counts.

    Returns:
        metric -> (value, standard error); NaN where lm-eval has "N/A" or nothing.
    """
    found: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for key, value in values.items():
        metric, comma, _ = key.partition(",")
        if comma:  # not alias, sample_len
            into = errors if metric.endswith("_stderr") else found
            into.setdefault(metric.removesuffix("_stderr"), value)
    return {name: (_as_float(value), _as_float(errors.get(name))) for name, value in found.items()}


def headline(
    results: Mapping[str, Mapping[str, Any]], task: str, metric: str | None = None
) -> tuple[str, float, float]:
    """Return the metric that a table shows of a task.

    Args:
        results: lm-eval's `results`.
        task: its name.
        metric: the one to take; `None` takes `HEADLINE_METRICS`, else acc, else the likeliest.

    Returns:
        (metric name, value, standard error); the error is NaN where lm-eval gives none.

    Raises:
        ValueError: the task was not evaluated, or has no metric, or not this one.
    """
    if task not in results:
        raise ValueError(f"no results for {task!r}; there are {sorted(results)}")
    found = metrics_of(results[task])
    if not found:
        raise ValueError(f"{task!r} has no metrics, only {sorted(results[task])}")
    if metric is not None and metric not in found:
        raise ValueError(f"{task!r} has no metric {metric!r}; it has {', '.join(sorted(found))}")
    preferred = [metric, HEADLINE_METRICS.get(task), "acc", "bits_per_byte", *found]
    name = next(name for name in preferred if name is not None and name in found)
    return name, *found[name]


def is_share(value: float, *, lower_is_better: bool) -> bool:
    """Return whether a metric counts right answers, and so is shown in percent and averaged."""
    return not lower_is_better and not abs(value) > 1


@dataclass(frozen=True)
class EvalResult:
    """Figures that lm-eval measured, as plain JSON-able data.

    Attributes:
        results: Per task and group, `"<metric>,<filter>"` and `"<metric>_stderr,<filter>"`. Of a
            task with NaN among its likelihoods every metric is NaN: lm-eval's own would be finite,
            since the largest of some numbers and a NaN has an index all the same.
        versions: Per task, the version in its YAML.
        n_samples: Per task, `"original"` and `"effective"` (after `limit`) numbers of documents.
        truncated: Number of requests longer than the model's context, cut from the left.
        truncated_tokens: Tokens cut off them.
        nonfinite: Per task that has any, the number of requests whose likelihood is NaN.
        items: Per task and metric that is 0 or 1 per document, those as a string of digits, where
            they were asked for.
        harness: All that lm-eval returned, `results` with the NaN as above.
    """

    results: dict[str, dict[str, Any]]
    versions: dict[str, Any]
    n_samples: dict[str, dict[str, int]]
    truncated: int = 0
    truncated_tokens: int = 0
    nonfinite: dict[str, int] = field(default_factory=dict)
    items: dict[str, dict[str, str]] = field(default_factory=dict)
    harness: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def joined(cls, results: Sequence[EvalResult]) -> EvalResult:
        """Return results of different tasks as one; of lm-eval's own, what is told task by task."""

        def both(name: str, sources: Sequence[Any]) -> dict[str, Any]:
            return {task: value for one in sources for task, value in one.get(name, {}).items()}

        each = [vars(result) for result in results]
        harness = [result.harness for result in results]
        return cls(
            **{name: both(name, each) for name in ("results", "versions", "n_samples")},
            truncated=sum(result.truncated for result in results),
            truncated_tokens=sum(result.truncated_tokens for result in results),
            **{name: both(name, each) for name in ("nonfinite", "items")},
            harness={name: both(name, harness) for name in ("results", "higher_is_better")},
        )

    def headline(self, task: str, metric: str | None = None) -> tuple[str, float, float]:
        """Return the metric a table shows: see `metis_hf.lab.evaluate.results.headline`."""
        return headline(self.results, task, metric)

    def to_dict(self) -> dict[str, Any]:
        """Return results, versions, numbers of samples and truncations, ready for `json.dump`."""
        return {
            "results": self.results,
            "versions": self.versions,
            "n_samples": self.n_samples,
            "truncated": self.truncated,
        }


def _as_float(value: Any) -> float:
    """Return NaN for what is no number: lm-eval writes "N/A" where there is no standard error."""
    return float(value) if isinstance(value, int | float) else math.nan
