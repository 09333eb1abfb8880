"""Pictures of one run: curves, noise against gradient, refreshes; and of several runs, overlaid."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from metis_hf.lab.run_report.run import RunRecord
from metis_hf.lab.show.figure import (
    COLORS,
    CROWDED,
    LINES,
    Style,
    as_png,
    figure_axes,
    plain_text,
    scheme_styles,
    smooth,
)
from metis_hf.schemes import CONTROL
from metis_hf.training.gradient_noise import Crossing, find_crossing
from metis_hf.training.reference_values import ORTHOGONAL, RELATIVE_ERROR

BLUE, ORANGE, GREEN = COLORS[0], COLORS[1], COLORS[2]
ALARM = "#D0021B"  # NaN and infinity; no series has it
_REFRESHED = (
    ("orthogonality", "|uᵀu - I|, entrywise maximum", True),
    ("narrowing", "max |w| / max |residual|", True),
    ("energy", "energy in the low-rank part", False),
)
# Of each: where it is good, where it is bad, and what that is.
_GOOD_AND_BAD = {
    "orthogonality": ((ORTHOGONAL, GREEN, "fp32 rounding"), (RELATIVE_ERROR, ALARM, "NVFP4 error")),
    "narrowing": ((1.0, ALARM, "1: no range taken away"),),
}


def _style(axis: Axes, label: str) -> None:
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _span(count: int) -> int:
    return max(1, count // 20) | 1


def _curve(
    axis: Axes, run: RunRecord, name: str, style: Style, label: str, *, raw: bool = True
) -> None:
    """Draw one figure of the log, raw (or not) and smoothed; marks steps that are not finite."""
    steps, values = run.series(name)
    if not steps:
        return
    span = _span(len(steps))
    marker = "." if len(steps) == 1 else None
    if raw or marker:
        axis.plot(steps, values, color=style.color, lw=0.7, alpha=0.35, marker=marker)
    shown = f"{label}, mean of {span} entries" if span > 1 and raw else label
    axis.plot(steps, smooth(values, span), color=style.color, ls=style.line, lw=1.6, label=shown)
    bad = [step for step, value in zip(steps, values) if not math.isfinite(value)]
    if bad:
        axis.plot(bad, [0.02] * len(bad), "x", color=ALARM, transform=axis.get_xaxis_transform(),
                  clip_on=False, label=f"{label} not finite ({len(bad)} steps)")  # fmt: skip


def _limit(axis: Axes, values: Sequence[float]) -> None:
    """Keep the first, steep part and single spikes from flattening the rest of a curve."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 20:
        return
    low, high = finite[0], finite[int(0.985 * (len(finite) - 1))]
    margin = 0.06 * (high - low) or 0.1
    axis.set_ylim(max(low - margin, 0 if low >= 0 else -math.inf), high + margin)


def _mark_switches(axes: Sequence[Axes], run: RunRecord) -> None:
    for step in run.switches:
        for axis in axes:
            axis.axvline(step, color="gray", lw=1, ls=":")
        axes[0].annotate("precision switched", (step, 1), xycoords=("data", "axes fraction"),
                         fontsize=8, color="gray", ha="center", va="bottom")  # fmt: skip


def curves(run: RunRecord) -> bytes:
    """Draw training and evaluation loss; below it gradient norm and learning rate."""
    figure, axes = figure_axes(3, 1, (10, 7.6), sharex=True, height_ratios=[3, 1.5, 1])
    loss, norm, rate = (row[0] for row in axes)
    _curve(loss, run, "loss", Style(BLUE), "training")
    shown = run.series("loss")[1]
    for index, (name, (steps, losses)) in enumerate(run.evaluation_series().items()):
        label = f"evaluation, {plain_text(name)}" if name else "evaluation"
        color = COLORS[1 + index % (len(COLORS) - 1)]  # the first is the training loss's
        loss.plot(steps, losses, "o-", color=color, ms=4, lw=1.2, label=label)
        shown = shown + losses
    _limit(loss, shown)
    _curve(norm, run, "grad_norm", Style(GREEN), "gradient norm")
    _limit(norm, run.series("grad_norm")[1])
    rate.plot(*run.series("learning_rate"), color="black", lw=1.3)
    _style(loss, "loss (nats per token)")
    _style(norm, "gradient norm")
    _style(rate, "learning rate")
    rate.set_xlabel("optimizer step")
    _mark_switches((loss, norm, rate), run)
    for axis in (loss, norm):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=9, loc="upper right")
    return as_png(figure)


def noise(run: RunRecord) -> tuple[bytes, Crossing]:
    """Return |G| / (sqrt(3) noise) of the weight gradients by step, and where it crosses 1."""
    series = run.noise_series()
    figure, axes = figure_axes(1, 1, (10, 4.2))
    axis = axes[0][0]
    steps, ratios = series["all"]
    axis.plot(steps, ratios, "o-", ms=4, lw=2.2, color="black", label="all layers", zorder=3)
    for index, (group, (xs, ys)) in enumerate(series.items()):
        if group != "all":
            axis.plot(xs, ys, marker="o", ms=2.5, lw=1, label=plain_text(group),
                      color=COLORS[(index - 1) % len(COLORS)],
                      ls="-" if index <= len(COLORS) else "--")  # fmt: skip
    crossing = find_crossing(steps, ratios)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.8), max(high, 1.3))
    axis.axhspan(min(low, 0.8), 1, color=ALARM, alpha=0.06, lw=0)
    axis.axhline(1, color=ALARM, lw=1.4)
    axis.annotate("1: gradient = √3 noise", (0.005, 1), xycoords=("axes fraction", "data"),
                  xytext=(0, -4), textcoords="offset points", va="top",
                  color=ALARM, fontsize=9)  # fmt: skip
    if crossing.step is not None:
        axis.axvline(crossing.step, color=ALARM, lw=1.2, ls="--")
        axis.annotate(f" stays below from step {crossing.step}", (crossing.step, 0.97),
                      xycoords=("data", "axes fraction"), color=ALARM, fontsize=9, va="top",
                      ha="left" if crossing.step < 0.7 * steps[-1] else "right")  # fmt: skip
    _style(axis, "|G| / (√3 noise), log scale")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value < 20 else "")
    axis.tick_params(axis="y", which="minor", labelsize=8)
    axis.set_xlabel("optimizer step")
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return as_png(figure), crossing


def refreshes(run: RunRecord) -> bytes:
    """Return what each refresh changed: median and range over the layers, before and after."""
    figure, axes = figure_axes(1, len(_REFRESHED), (12, 3.6))
    for axis, (stat, label, log) in zip(axes[0], _REFRESHED):
        for moment, color, marker in (("before", ORANGE, "o"), ("after", BLUE, "s")):
            points = []
            for step, layers in run.refreshes.items():
                values = [layer[moment][stat] for layer in layers.values() if layer]
                if values and all(math.isfinite(value) for value in values):
                    middle = statistics.median(values)
                    points.append((step, middle, middle - min(values), max(values) - middle))
            if points:
                x, y, below, above = zip(*points)
                axis.errorbar(x, y, yerr=(below, above), fmt=f"{marker}-", ms=4, lw=1.2,
                              capsize=3, elinewidth=0.8, color=color, label=moment)  # fmt: skip
        if log:
            axis.set_yscale("log")
        for value, color, meaning in _GOOD_AND_BAD.get(stat, ()):
            axis.axhline(value, color=color, lw=1, ls="--")
            axis.annotate(meaning, (0.98, value), xycoords=("axes fraction", "data"), ha="right",
                          xytext=(0, 2), textcoords="offset points", color=color,
                          fontsize=8)  # fmt: skip
        _style(axis, label)
        axis.set_xlabel("step of the refresh")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False)
    return as_png(figure)


def overlay(runs: Sequence[RunRecord]) -> bytes:
    """Draw loss and gradient norm of several runs, the control in black; of many, smoothed alone.

    Raises:
        ValueError: more runs than can be told apart; see `shared.figures.scheme_styles`.
    """
    figure, axes = figure_axes(2, 1, (10, 7), sharex=True, height_ratios=[2, 1])
    loss, norm = (row[0] for row in axes)
    controls = [run.name for run in runs if run.config.get("scheme") == CONTROL]
    others = [run.name for run in runs if run.name not in controls]
    styles = scheme_styles(others, CONTROL)
    styles |= {name: Style("black", line) for name, line in zip(controls, cycle(LINES))}
    crowded = len(runs) > CROWDED
    for axis, name in ((loss, "loss"), (norm, "grad_norm")):
        limits: list[float] = []
        for run in runs:
            label = plain_text(run.name)
            _curve(axis, run, name, styles[run.name], label, raw=not crowded)
            values = run.series(name)[1]
            limits += smooth(values, _span(len(values))) if crowded else values
        _limit(axis, limits)
    _style(loss, "training loss (nats per token)")
    _style(norm, "gradient norm")
    norm.set_xlabel("optimizer step")
    if crowded:
        handles, labels = loss.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=9, frameon=False)
    else:
        loss.legend(frameon=False, fontsize=9, loc="upper right")
    return as_png(figure)
