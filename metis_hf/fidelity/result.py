"""Results of a model in several schemes: the record, and the numbers that tables show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """A mean over batches and its standard error; NaN where one batch says nothing of it."""

    mean: float
    se: float = math.nan

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of values, one a batch."""
        if not all(map(math.isfinite, values)):
            return cls(math.nan)
        if len(values) < 2:
            return cls(values[0] if values else math.nan)
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))

    def text(self, spec: str) -> str:
        """Return "mean ± standard error", both in a format such as ".2f"."""
        if not math.isfinite(self.mean):
            return "not finite"
        return format(self.mean, spec) + (
            f" ± {format(self.se, spec.lstrip('+'))}" if math.isfinite(self.se) else ""
        )


@dataclass
class SchemeResult:
    """Measurements of one scheme.

    Attributes:
        name: in tables: the scheme's, with the rank where several were asked for.
        scheme: the registered name.
        rank: of `metis` at a rank of its own; None: as the scheme chooses.
        overhead: kind of work -> share of the GEMMs' multiply-adds.
        weight_bits: for each element of a weight.
        batches: statistics of each batch of the held-out text; see `loss.predictions`.
        gradients: of each batch: "error", "cosine"; of their mean: "mean".
        kinds: what operands of one kind alone do (see `operands.KINDS`), and all of them on the
            same batches: a third of those of the loss, one of the gradient's.
        layers: errors of each layer on exact inputs; see `operands.layer_errors`.
        alone: what each layer alone does to the predictions: "loss" above the exact model's, "kl";
            and "whole", all of them together, on the same tokens.
        note: why there is nothing; empty where there is.
    """

    name: str
    scheme: str
    rank: int | None = None
    overhead: dict[str, float] = field(default_factory=dict)
    weight_bits: float = math.nan
    batches: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)
    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    alone: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def cost(self) -> float:
        """Multiply-adds beyond the three GEMMs, in % of theirs."""
        return 100 * sum(self.overhead.values())

    @property
    def rise(self) -> Estimate:
        """Held-out loss above the exact model's, in % of it; the error is of paired batches."""
        exact = statistics.fmean([b["exact"] for b in self.batches]) if self.batches else math.nan
        return Estimate.of([100 * (b["loss"] - b["exact"]) / exact for b in self.batches])

    def mean(self, key: str) -> Estimate:
        """Return "kl" or "top1" over batches."""
        return Estimate.of([batch[key] for batch in self.batches])

    def gradient(self, key: str) -> Estimate:
        """Return "error" or "cosine" of one batch's gradient."""
        return Estimate.of(self.gradients.get(key, []))

    def mean_gradient(self, key: str) -> Estimate:
        """Return "error" or "cosine" of the mean gradient over batches."""
        found = self.gradients.get("mean", {})
        return Estimate(found.get(key, math.nan), found.get(f"{key}_se", math.nan))


HEADER = (
    "Scheme",
    "Extra multiply-adds %",
    "Weight bits",
    "Loss rise %",
    "KL (nats)",
    "Same top token %",
    "Gradient error",
    "of the mean",
    "Gradient cosine",
    "of the mean",
)


def cells(result: SchemeResult) -> list[str]:
    """Return a row of the table, as text; a scheme that could not be measured says why."""
    head = [result.name, f"{result.cost:.1f}", f"{result.weight_bits:.2f}"]
    if result.note:
        return [result.name, result.note, *[""] * (len(HEADER) - 2)]
    top1 = result.mean("top1")
    return [
        *head,
        result.rise.text("+.2f"),
        result.mean("kl").text(".4f"),
        Estimate(100 * top1.mean, 100 * top1.se).text(".1f"),
        result.gradient("error").text(".3f"),
        result.mean_gradient("error").text(".3f"),
        result.gradient("cosine").text(".3f"),
        result.mean_gradient("cosine").text(".3f"),
    ]


# Columns that fit a terminal of 80 characters.
NARROW = (0, 1, 3, 4, 6, 8)


def narrow(row: Sequence[str]) -> list[str]:
    """Return the cells of a row, or of the header, that a terminal shows: no standard errors."""
    words = {"Extra multiply-adds %": "Extra %", "KL (nats)": "KL", "Gradient cosine": "Cosine"}
    return [words.get(row[place], row[place]).partition(" ±")[0] for place in NARROW]
