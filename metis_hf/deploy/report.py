"""The export report: weight errors by kind of layer, and held-out losses."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from metis_hf.numerics import relative_error, sqnr_db
from metis_hf.shared.layer_names import group_of

REFERENCE = "dense"  # loss differences are relative to this one
CONVERTED = "converted"
_MODELS = {
    REFERENCE: "dense: the represented weights, unquantized",
    CONVERTED: "converted: the model as it evaluates in its scheme",
    "fold": "fold: packed, low-rank part folded in",
    "side-file": "side-file: packed, low-rank part in a side file",
}


@dataclass(frozen=True)
class LossRow:
    """The weight errors of one choice for one kind of layer.

    Attributes:
        choice: "dense", "fold" or "side-file".
        kind: last part of the layers' names.
        layers: number of layers.
        mean_error: mean over the layers of |w - w_choice| / |w| (Frobenius norm), w being the
            weight that the checkpoint represents, in fp32.
        max_error: the largest of these errors.
        sqnr_db: the smallest signal-to-noise ratio of a layer, in dB.
    """

    choice: str
    kind: str
    layers: int
    mean_error: float
    max_error: float
    sqnr_db: float


@dataclass(frozen=True)
class ExportReport:
    """The result of an export and its errors.

    Attributes:
        format: "dense", "compressed-tensors" or "modelopt".
        dtype: dtype of everything that is not packed.
        low_rank: "fold" or "side-file"; None for a dense export, or if no weight was split.
        packed: names of the layers stored in four bits.
        rows: weight errors, for each choice that this format has.
        held_out: model -> loss in nats per token on the given text. "dense", the first: the
            represented weights in fp32, nothing quantized. "converted": the model as it evaluates
            before the export. Others: choices of this format, with the stored weight values. All
            are computed in fp32, with packed layers' inputs quantized under scheme "w4a4". Empty
            without a text.
        bytes: total size of all weight files.
        loading: Python code that loads the export.
        serving: command that serves it; empty if vLLM is known not to run it correctly.
        notes: sentences for whoever deploys the export.
    """

    format: str
    dtype: str
    low_rank: str | None
    packed: tuple[str, ...]
    rows: tuple[LossRow, ...]
    held_out: Mapping[str, float]
    bytes: int
    loading: str = ""
    serving: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the report as a JSON object; NaN and infinity become null."""
        values = dataclasses.asdict(self)
        del values["loading"], values["serving"]  # they contain local paths
        for numbers in (*values["rows"], values["held_out"]):
            for name, value in numbers.items():
                if isinstance(value, float) and not math.isfinite(value):
                    numbers[name] = None
        return json.dumps(values, indent=2, allow_nan=False) + "\n"


class WeightErrors:
    """Collects errors of weights by choice and kind of layer."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def add(self, choice: str, name: str, weight: Tensor, exported: Tensor) -> None:
        found = relative_error(weight, exported).item(), sqnr_db(weight, exported).item()
        if torch.equal(weight, exported):  # for zeros both are 0 / 0
            found = 0.0, math.inf
        kind = group_of(name).removeprefix("metis_")  # experts: their exported name
        self._found.setdefault((choice, kind), []).append(found)

    def rows(self) -> tuple[LossRow, ...]:
        return tuple(
            LossRow(
                choice,
                kind,
                len(found),
                sum(error for error, _ in found) / len(found),
                max(error for error, _ in found),
                min(decibels for _, decibels in found),
            )
            for (choice, kind), found in sorted(self._found.items())
        )


HEADER = ("Choice", "Layers", "Count", "Mean error", "Max error", "SQNR dB")


def report_rows(report: ExportReport) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the error table, under `HEADER`."""
    for row in report.rows:
        yield (
            row.choice,
            row.kind,
            str(row.layers),
            f"{row.mean_error:.2e}",
            f"{row.max_error:.2e}",
            f"{row.sqnr_db:.1f}",
        )


LOSS_HEADER = ("Held-out loss", "nats per token", f"difference to {REFERENCE}")


def loss_rows(report: ExportReport) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the loss table, under `LOSS_HEADER`."""
    for name, loss in report.held_out.items():
        shown = _MODELS.get(name, f"{name}: as stored")
        if name == "fold" and report.low_rank is None:
            shown = "packed"
        yield shown, f"{loss:.4f}", f"{loss - report.held_out[REFERENCE]:+.4f}"


def report_section(report: ExportReport) -> str:
    """Return the report as a markdown section of the model card."""
    packed = f"{len(report.packed)} layers are packed to 4.5 bits per weight, the rest is"
    lines = [
        "## What the export costs",
        "",
        f"{report.bytes:,} bytes of weights: {packed if report.packed else 'all'} in "
        f"{report.dtype}.",
        "",
        "Errors of the exported weights relative to those that the checkpoint represents.",
        "",
        f"| {' | '.join(HEADER)} |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(f"| {' | '.join(cells)} |" for cells in report_rows(report)),
    ]
    if report.held_out:
        lines += ["", f"| {' | '.join(LOSS_HEADER)} |", "| --- | ---: | ---: |"]
        lines += [f"| {' | '.join(cells)} |" for cells in loss_rows(report)]
    for note in report.notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"
