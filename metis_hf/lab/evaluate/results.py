"""Results of an evaluation, and the metrics that a table shows; does not import lm_eval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The metrics that a table shows instead of plain accuracy.
HEADLINE_METRICS = {"arc_challenge": "acc_norm", "hellaswag": "acc_norm"}


def metrics_of(values: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return metric -> (value, standard error) from lm-eval's values of one task.

    "N/A" and missing values become NaN; of several filters the first counts.
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
    """Return (name, value, standard error) of a task's metric in lm-eval's `results`.

    None takes the metric that a table shows: `HEADLINE_METRICS`, else acc, else bits_per_byte, else
    the first.

    Raises:
        ValueError: the task was not evaluated, has no metrics, or not this metric.
    """
    if task not in results:
        raise ValueError(f"no results for {task!r}; there are results for {sorted(results)}")
    found = metrics_of(results[task])
    if not found:
        raise ValueError(f"{task!r} has no metrics, only {sorted(results[task])}")
    if metric is not None and metric not in found:
        raise ValueError(f"{task!r} has no metric {metric!r}; it has {', '.join(sorted(found))}")
    preferred = [metric, HEADLINE_METRICS.get(task), "acc", "bits_per_byte", *found]
    name = next(name for name in preferred if name is not None and name in found)
    return name, *found[name]


def is_share(value: float, *, lower_is_better: bool) -> bool:
    """Return whether a metric is a share of right answers, to show in percent and to average."""
    return not lower_is_better and not abs(value) > 1


def right_items(documents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return metric -> one digit per document, for metrics that are 0 or 1 for each.

    lm-eval logs a document once per filter of its task; the scores come from the first filter.
    """
    first = [each for each in documents if each.get("filter") == documents[0].get("filter")]
    found = {}
    for metric in first[0]["metrics"] if first else []:
        values: list[Any] = [document.get(metric) for document in first]
        if all(isinstance(value, int | float) and value in (0, 1) for value in values):
            found[metric] = "".join(str(int(value)) for value in values)
    return found


@dataclass(frozen=True)
class EvalResult:
    """lm-eval's results for a model.

    Attributes:
        harness: lm-eval's results (`results`, `versions`, `n-samples`, ...). If a likelihood of a
            task is NaN, every metric of the task is NaN; lm-eval's own would be finite, since
            argmax returns an index even among NaN.
        samples: Per task, the documents as lm-eval logs them, if requested.
        truncated: Number of requests longer than the model's context, truncated on the left.
        truncated_tokens: Tokens that these requests lost.
        nonfinite: Per task that has any, the number of requests whose likelihood is NaN.
    """

    harness: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    truncated: int = 0
    truncated_tokens: int = 0
    nonfinite: dict[str, int] = field(default_factory=dict)

    @classmethod
    def joined(cls, results: Sequence[EvalResult]) -> EvalResult:
        """Merge results of different tasks, with the sections that lm-eval has per task."""
        sections = ("results", "versions", "n-samples", "higher_is_better")
        return cls(
            {name: union(one.harness.get(name, {}) for one in results) for name in sections},
            union(one.samples for one in results),
            sum(one.truncated for one in results),
            sum(one.truncated_tokens for one in results),
            union(one.nonfinite for one in results),
        )

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """Per task and group, `"<metric>,<filter>"` and `"<metric>_stderr,<filter>"`."""
        return self.harness["results"]

    def headline(self, task: str, metric: str | None = None) -> tuple[str, float, float]:
        """Return the metric that a table shows; see `metis_hf.lab.evaluate.results.headline`."""
        return headline(self.results, task, metric)


def union(dictionaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge dictionaries; for a repeated key the last value wins."""
    return {key: value for one in dictionaries for key, value in one.items()}


def _as_float(value: Any) -> float:
    """Return a number as it is, else NaN: lm-eval writes "N/A" for a missing standard error."""
    return float(value) if isinstance(value, int | float) else math.nan
