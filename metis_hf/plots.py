"""Pictures of a comparison: loss curves with the gap to the control, spectral health over time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metis_hf.experiment import CONTROL, SchemeResult

# Okabe and Ito's palette, told apart by people with any colour vision; the control is black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
# Seven colors are fewer than the schemes: each round of them has its own lines and markers.
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
CROWDED = 8  # curves; more have their names outside, and none at their ends

HEALTH_PANELS = (
    ("stable_rank", "stable rank"),
    ("energy", "energy in the kept part\n(each at its own rank)"),
    ("narrowing", "max |x| / max |residual|\n(each at its own rank)"),
    ("sqnr_db", "SQNR of the operand (dB)"),
    ("zeroed", "share of elements zeroed"),
)
TENSORS = ("weight", "activation", "gradient")


def figure_axes(rows: int, columns: int, size: tuple[float, float], **kwargs):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


@dataclass(frozen=True)
class Style:
    """How a scheme is drawn; no two of a picture share all three."""

    color: str
    line: str = "-"
    marker: str = "o"


def scheme_styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each scheme or variant, in their order; black for the control.

    Raises:
        ValueError: more than the 28 others that can be told apart.
    """
    others = [name for name in names if name != CONTROL]
    rounds = list(zip(LINES, MARKERS))
    if len(others) > len(COLORS) * len(rounds):
        raise ValueError(
            f"{len(others)} schemes in one picture; only {len(COLORS) * len(rounds)} can be told "
            "apart. Compare fewer, or in several directories"
        )
    styles = [Style(color, *round_) for round_ in rounds for color in COLORS]
    return {CONTROL: Style("black")} | dict(zip(others, styles))


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Centred moving average over at most `span` values, shorter at the ends."""
    half = span // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def plot_loss(results: Sequence[SchemeResult], path: Path, title: str) -> None:
    """Training loss by step, and below it the gap to the control in percent, on equal batches."""
    figure, axes = figure_axes(2, 1, (8, 7), sharex=True, height_ratios=[3, 2])
    (top,), (bottom,) = axes
    styles = scheme_styles([r.scheme for r in results])
    control = next((r for r in results if r.scheme == CONTROL), None)
    span = max(1, len(results[0].history) // 20)
    ends, labels = [], []
    for result in results:
        steps = [entry["step"] for entry in result.history]
        losses = [entry["loss"] for entry in result.history]
        style = styles[result.scheme]
        look = {"color": style.color, "ls": style.line, "lw": 1.5}
        top.plot(steps, smooth(losses, span), label=result.scheme, **look)
        ends += smooth(losses, span)[len(losses) // 10 :]
        if control is not None and result is not control:
            pairs = zip(losses, (entry["loss"] for entry in control.history))
            gaps = smooth([100 * (loss / base - 1) for loss, base in pairs], 2 * span)
            bottom.plot(steps[: len(gaps)], gaps, **look)
            labels.append((gaps[-1], steps[len(gaps) - 1], result.scheme))
    margin = 0.05 * (max(ends) - min(ends))
    top.set_ylim(min(ends) - margin, max(ends) + margin)
    top.set_ylabel("training loss (nats per token)")
    if len(results) > CROWDED:
        labels = []
        figure.legend(*top.get_legend_handles_labels(), loc="outside right center", frameon=False)
    else:
        top.legend(frameon=False)
    top.set_title(title)
    bottom.axhline(0, color="black", lw=1)
    bottom.set_ylabel(f"gap to {CONTROL} (%)")
    bottom.set_xlabel(f"optimizer step (moving averages of {span} and {2 * span} steps)")
    low, high = bottom.get_ylim()
    for (_, step, scheme), place in zip(labels, spread([x[0] for x in labels], (high - low) / 18)):
        bottom.annotate(f" {scheme}", (step, place), color=styles[scheme].color, fontsize=8,
                        va="center", annotation_clip=False)  # fmt: skip
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def spread(places: Sequence[float], distance: float) -> list[float]:
    """Moves label positions apart, upwards from the lowest, in their order by height."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for below, above in itertools.pairwise(order):
        moved[above] = max(moved[above], moved[below] + distance)
    return moved


def health_series(result: SchemeResult, tensor: str, stat: str) -> tuple[list[int], list[float]]:
    """(steps, mean over layer groups) of one statistic."""
    steps: list[int] = []
    means: list[float] = []
    for entry in result.history:
        prefix, suffix = f"metis/{tensor}/", f"/{stat}"
        values = [v for k, v in entry.items() if k.startswith(prefix) and k.endswith(suffix)]
        if values:
            steps.append(int(entry["step"]))
            means.append(sum(values) / len(values))
    return steps, means


def plot_spectra(results: Sequence[SchemeResult], path: Path, title: str) -> None:
    """Spectral health over training: a row per tensor, a column per statistic."""
    figure, axes = figure_axes(len(TENSORS), len(HEALTH_PANELS), (16, 8), sharex=True)
    styles = scheme_styles([r.scheme for r in results])
    for row, tensor in zip(axes, TENSORS):
        for axis, (stat, label) in zip(row, HEALTH_PANELS):
            for result in results:
                steps, means = health_series(result, tensor, stat)
                if steps:
                    style = styles[result.scheme]
                    axis.plot(steps, means, marker=style.marker, ls=style.line, ms=3, lw=1.3,
                              color=style.color, label=result.scheme)  # fmt: skip
            if tensor == TENSORS[0]:
                axis.set_title(label, fontsize=10)
            if tensor == TENSORS[-1]:
                axis.set_xlabel("step")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(tensor)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=8, frameon=False)
    figure.suptitle(title)
    figure.savefig(path)
