"""Tabulate gaps by tokens per parameter, and their worth in tokens: report/from-scratch.md.

    python eval/studies/gap_by_tokens.py

Reads the records of `metis-hf compare` with one model and several numbers of tokens. Nothing is
trained. The worth of a gap is the share of tokens that the control could save and still reach the
scheme's loss. The control's loss is interpolated linearly in log(tokens) between its runs, and
extrapolated from the nearest two. Writes eval/results/tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from fidelity_and_training import DIRECTIONS, Setting
from fidelity_and_training import read as read_points
from gap_figure import plot_gaps
from publish import RESULTS, ROOT, publish_table

from metis_hf.lab.compare.loss_table import format_gap
from metis_hf.lab.compare.statistics import Interval, gaps_percent, t_interval
from metis_hf.lab.show.figure import figure_axes
from metis_hf.lab.show.table import markdown_table
from metis_hf.schemes import CONTROL

PAGE = ROOT / "eval" / "results" / "report" / "from-scratch.md"
RECORDS = ("tokens-5", "tokens-10", "tokens-20", "tokens-40")
OUT = RESULTS / "tokens"
MARK = "gap by tokens"
ALIKE = ("model", "sequence_length", "training")


@dataclass(frozen=True)
class Length:
    """The runs with one number of tokens.

    Attributes:
        tokens: of each run.
        parameters: of the model, embeddings included.
        losses: variant -> seed -> held-out loss.
        dense: variant -> seed -> held-out loss without quantizers.
        divergence: variant -> KL of the control (seed 0) under its quantizers, nats per token.
    """

    tokens: int
    parameters: int
    losses: dict[str, dict[int, float]]
    dense: dict[str, dict[int, float]]
    divergence: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.parameters

    def gap(self, name: str, *, dense: bool = False) -> Interval:
        """Return the paired gap to the control, percent of the control's loss."""
        losses, base = (self.dense if dense else self.losses)[name], self.losses[CONTROL]
        return t_interval(list(gaps_percent(losses, base).values()))


def read() -> list[Length]:
    """Return the records, shortest first, limited to the seeds that the control has in all.

    Raises:
        ValueError: models or settings differ, or the controls have no common seed.
    """
    found, first = [], None
    for name in RECORDS:
        record = json.loads((RESULTS / f"{name}.json").read_text())
        experiment = record["plan"]["experiment"]
        setup = {key: experiment[key] for key in ALIKE}
        setup["training"] = {k: v for k, v in setup["training"].items() if "steps" not in k}
        first = first or setup
        differing = [key for key in ALIKE if setup[key] != first[key]]
        if differing:
            raise ValueError(f"{name} differs from another record in {', '.join(differing)}")
        losses: dict[str, dict[int, float]] = {}
        dense: dict[str, dict[int, float]] = {}
        for run in record["runs"]:
            losses.setdefault(run["scheme"], {})[run["seed"]] = run["loss"]
            dense.setdefault(run["scheme"], {})[run["seed"]] = run["loss_dense"]
        divergence = {}
        if (RESULTS / "prediction" / name).exists():
            points = read_points(Setting(name, f"prediction/{name}", (name,), DIRECTIONS))
            divergence = {point.variant: point.divergence for point in points}
        parameters = record["runs"][0]["parameters"]
        found.append(Length(record["tokens"], parameters, losses, dense, divergence))
    seeds = set.intersection(*(set(length.losses[CONTROL]) for length in found))
    if not seeds:
        raise ValueError(
            f"no seed of {CONTROL} is in all of the records {', '.join(RECORDS)}; train one"
        )
    alike = [
        replace(x, losses=_of_seeds(x.losses, seeds), dense=_of_seeds(x.dense, seeds))
        for x in found
    ]
    return sorted(alike, key=lambda length: length.tokens)


def _of_seeds(losses: dict[str, dict[int, float]], seeds: set[int]) -> dict[str, dict[int, float]]:
    """Return the losses of these seeds, and drop variants without any."""
    some = {name: {s: x for s, x in of.items() if s in seeds} for name, of in losses.items()}
    return {name: of for name, of in some.items() if of}


def worth(loss: float, control: Mapping[int, float]) -> float:
    """Return the number of tokens at which the control reaches a held-out loss, nats per token.

    `control` maps tokens to the control's loss, at least two entries.

    Raises:
        ValueError: the control's loss does not fall from one number of tokens to the next.
    """
    tokens = sorted(control)
    for fewer, more in pairwise(tokens):
        if not control[more] < control[fewer]:
            raise ValueError(
                f"{CONTROL} has a loss of {control[fewer]:.4f} with {fewer:,} tokens and of "
                f"{control[more]:.4f} with {more:,}; a gap has no worth in tokens unless the loss "
                "falls, so leave one of these records out of RECORDS"
            )
    # The segment around the loss; beyond the ends, extrapolate the first or last segment.
    index = sum(control[count] >= loss for count in tokens)
    low = min(max(index - 1, 0), len(tokens) - 2)
    one, other = tokens[low], tokens[low + 1]
    slope = (control[other] - control[one]) / math.log(other / one)
    return one * math.exp((loss - control[one]) / slope)


def saved(lengths: Sequence[Length], length: Length, name: str) -> Interval:
    """Return the percentage of its tokens that the control could save at the variant's loss."""
    shares = []
    for seed, loss in length.losses[name].items():
        control = {other.tokens: other.losses[CONTROL][seed] for other in lengths}
        shares.append(100 * (1 - worth(loss, control) / length.tokens))
    return t_interval(shares)


def variants(lengths: Sequence[Length]) -> list[str]:
    """Return the names of the variants, without the control, that all lengths have."""
    names = [name for name in lengths[0].losses if name != CONTROL]
    return [name for name in names if all(name in length.losses for length in lengths)]


def tables(lengths: Sequence[Length]) -> str:
    """Return the table, with a column for each number of tokens per parameter."""
    rows = [
        ["tokens", *(f"{length.tokens / 1e6:.2f}M" for length in lengths)],
        [
            f"loss of `{CONTROL}`",
            *(f"{np.mean(list(length.losses[CONTROL].values())):.4f}" for length in lengths),
        ],
    ]
    for title, cell in (
        ("gap, %", lambda length, name: length.gap(name)),
        ("gap dense, %", lambda length, name: length.gap(name, dense=True)),
        ("worth, % of the tokens", lambda length, name: saved(lengths, length, name)),
    ):
        for name in variants(lengths):
            cells = (format_gap(cell(length, name)) for length in lengths)
            rows.append([f"`{name}`: {title}", *cells])
    for name in variants(lengths):
        if all(name in length.divergence for length in lengths):
            cells = (f"{length.divergence[name]:.4f}" for length in lengths)
            rows.append([f"`{name}`: KL of the control", *cells])
    return markdown_table(["Tokens per parameter", *(f"{x.ratio:.0f}" for x in lengths)], rows)


def draw(lengths: Sequence[Length], path: Path) -> None:
    """Draw the gaps, and their worth in tokens, against tokens per parameter."""
    figure, axes = figure_axes(1, 2, (9.5, 4.6))
    figure.suptitle(f"Llama with {lengths[0].parameters / 1e3:.0f}k parameters from scratch")
    panels: tuple[tuple[str, Any], ...] = (
        ("held-out loss above bf16 (%)", lambda length, name: length.gap(name)),
        ("worth, % of the tokens", lambda length, name: saved(lengths, length, name)),
    )
    for axis, (label, value) in zip(axes[0], panels, strict=True):
        found = {
            name: {length.ratio: value(length, name) for length in lengths}
            for name in variants(lengths)
        }
        plot_gaps(axis, found, {length.ratio: f"{length.ratio:.0f}" for length in lengths})
        axis.set_xlabel("tokens per parameter")
        axis.set_ylabel(label)
    axes[0][1].legend(loc="upper left")
    figure.savefig(path)


def main() -> None:
    lengths = read()
    text = tables(lengths)
    publish_table(OUT, MARK, text, PAGE)
    draw(lengths, OUT / "gap.png")
    print(text)


if __name__ == "__main__":
    main()
