"""Results of a model in several schemes: the record, and the columns of tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """A mean over batches and its standard error, which is NaN for a single batch."""

    mean: float
    se: float = math.nan

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate from one value per batch."""
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
class SchemeFidelity:
    """Measurements of one scheme."""

    name: str  # in tables: the scheme's, with the rank where several were asked for
    scheme: str  # the registered name
    rank: int | None = None  # the config's rank; None: the scheme chooses
    overhead: dict[str, float] = field(default_factory=dict)  # work -> share of the GEMMs'
    weight_bits: float = math.nan  # per element of a weight
    # Statistics of each held-out batch (`predictions.predictions`), with the rounding of evaluation
    # and, if the forward pass then has noise, of training.
    batches: list[dict[str, float]] = field(default_factory=list)
    training: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)  # "error", "cosine", "mean"
    # Effects of quantizing operands of one kind alone (see `layer_errors.KINDS`), and of all kinds
    # on the same batches: a third of the loss's batches, one of the gradient's.
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)
    layers: dict[str, dict[str, float]] = field(default_factory=dict)  # see `layer_errors`
    # Effects on predictions of each layer alone, and "whole": of all layers on the same tokens.
    alone: dict[str, Any] = field(default_factory=dict)
    note: str = ""  # why nothing was measured; empty otherwise
    warning: str = ""  # why the numbers may mislead

    def take(
        self,
        loss: dict[str, Any],
        gradients: dict[str, Any],
        layers: dict[str, Any],
        alone: dict[str, Any] | None,
    ) -> None:
        """Store the measured parts."""
        self.batches, self.training, self.kinds = loss["batches"], loss["training"], loss["kinds"]
        for kind, values in gradients["kinds"].items():
            self.kinds.setdefault(kind, {}).update(values)
        self.gradients = {key: value for key, value in gradients.items() if key != "kinds"}
        self.layers, self.alone = layers, alone or {}

    @property
    def cost(self) -> float:
        """Multiply-adds beyond the three GEMMs, in % of theirs."""
        return 100 * sum(self.overhead.values())

    @property
    def rise(self) -> Estimate:
        """Held-out loss above the exact model's, in % of it; the error is over paired batches."""
        exact = statistics.fmean([b["exact"] for b in self.batches]) if self.batches else math.nan
        return Estimate.of([100 * (b["loss"] - b["exact"]) / exact for b in self.batches])

    def mean(self, key: str, scale: float = 1.0) -> Estimate:
        """Return "kl" or "top1" over batches, times `scale`."""
        return Estimate.of([scale * batch[key] for batch in self.batches])

    @property
    def kl_in_training(self) -> Estimate:
        """KL divergence with the rounding of training, nats per token."""
        return Estimate.of([batch["kl"] for batch in self.training or self.batches])

    def gradient(self, key: str) -> Estimate:
        """Return "error" or "cosine" of one batch's gradient."""
        return Estimate.of(self.gradients.get(key, []))

    def mean_gradient(self, key: str) -> Estimate:
        """Return "error" or "cosine" of the mean gradient over batches."""
        found = self.gradients.get("mean", {})
        return Estimate(found.get(key, math.nan), found.get(f"{key}_se", math.nan))


@dataclass(frozen=True)
class Column:
    """A column of tables: one number per scheme."""

    title: str
    value: Callable[[SchemeFidelity], Estimate]
    spec: str  # its format, such as ".2f"
    short: str = ""  # the title in a terminal; empty: not shown in a terminal


_KL_IN_TRAINING = Column("KL in training", lambda r: r.kl_in_training, ".4f", "KL in training")
_COLUMNS = (  # best predictors of training first
    Column("KL (nats)", lambda r: r.mean("kl"), ".4f", "KL (nats)"),
    _KL_IN_TRAINING,
    Column("Loss rise %", lambda r: r.rise, "+.2f", "Loss rise %"),
    Column("Extra multiply-adds %", lambda r: Estimate(r.cost), ".1f", "Extra %"),
    Column("Weight bits", lambda r: Estimate(r.weight_bits), ".2f"),
    Column("Same top token %", lambda r: r.mean("top1", 100), ".1f"),
    Column("Gradient error", lambda r: r.gradient("error"), ".3f", "Gradient error"),
    Column("Mean gradient error", lambda r: r.mean_gradient("error"), ".3f"),
    Column("Gradient cosine", lambda r: r.gradient("cosine"), ".3f"),
    Column("Mean gradient cosine", lambda r: r.mean_gradient("cosine"), ".3f"),
)


_NARROW = 4  # columns that fit into 80 characters


def columns(results: Sequence[SchemeFidelity]) -> list[Column]:
    """Return the columns of a table; KL in training only if it differs from evaluation."""
    differs = any(result.training for result in results)
    return [column for column in _COLUMNS if differs or column is not _KL_IN_TRAINING]


def table(results: Sequence[SchemeFidelity]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, as text; the row of a scheme that was not measured says why."""
    shown = columns(results)
    rows = []
    for result in results:
        cells = [column.value(result).text(column.spec) for column in shown]
        if result.note:
            cells = [result.note, *[""] * (len(shown) - 1)]
        rows.append([result.name, *cells])
    return ["Scheme", *(column.title for column in shown)], rows


def narrow_table(results: Sequence[SchemeFidelity]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of measured schemes for a terminal of 80 characters."""
    measured = [result for result in results if not result.note]
    shown = [column for column in columns(measured) if column.short][:_NARROW]
    rows = [[r.name, *(column.value(r).text(column.spec) for column in shown)] for r in measured]
    return ["Scheme", *(column.short for column in shown)], rows
