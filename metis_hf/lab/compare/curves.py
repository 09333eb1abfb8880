"""Pictures of an experiment: loss curves with the gap to the control, spectral health over time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.compare.tasks_table import gaps_percent
from metis_hf.lab.show.figure import (
    CROWDED,
    Style,
    figure_axes,
    plain_text,
    scheme_styles,
    smooth,
    spread,
)
from metis_hf.schemes import CONTROL
from metis_hf.training.health import TENSORS

HEALTH_PANELS = (
    ("stable_rank", "stable rank"),
    ("energy", "energy in the kept part\n(each at its own rank)"),
    ("narrowing", "max |x| / max |residual|\n(each at its own rank)"),
    ("sqnr_db", "SQNR of the operand (dB)"),
    ("zeroed", "share of elements zeroed"),
)


def curves(results: Sequence[SchemeResult]) -> dict[str, tuple[list[int], list[list[float]]]]:
    """Return variant -> (steps, the training losses of each seed at these steps)."""
    found: dict[str, list[dict[int, float]]] = {}
    for result in results:
        found.setdefault(result.scheme, []).append(_losses(result))
    return {name: _at_common_steps(losses) for name, losses in found.items()}


def paired_gaps(
    results: Sequence[SchemeResult], name: str, span: int
) -> tuple[list[int], list[list[float]]]:
    """Return (steps, smoothed gap to the control in percent, for each seed that both have)."""
    control = {r.seed: _losses(r) for r in results if r.scheme == CONTROL}
    gaps = []
    for result in results:
        if result.scheme == name and result.seed in control:
            gaps.append(gaps_percent(_losses(result), control[result.seed]))
    steps, values = _at_common_steps(gaps)
    return steps, [smooth(each, span) for each in values]


def _losses(result: SchemeResult) -> dict[int, float]:
    return {int(entry["step"]): entry["loss"] for entry in result.history}


def _at_common_steps(series: Sequence[dict[int, float]]) -> tuple[list[int], list[list[float]]]:
    """Return (steps, values of each): an earlier version logged fewer, and a run may have ended."""
    steps = sorted(set.intersection(*map(set, series))) if series else []
    return steps, [[values[step] for step in steps] for values in series]


def plot_curves(results: Sequence[SchemeResult], path: Path, title: str) -> None:
    """Draw training loss by step, and the paired gap to the control; bands span the seeds."""
    figure, axes = figure_axes(2, 1, (8.5, 7.5), sharex=True, height_ratios=[3, 2.4])
    (top,), (bottom,) = axes
    by_name = curves(results)
    styles = scheme_styles(list(by_name), CONTROL)
    span = max(1, max(len(steps) for steps, _ in by_name.values()) // 20)
    labels, ends = [], []
    for name, (steps, losses) in by_name.items():
        smoothed = [smooth(values, span) for values in losses]
        _band(top, steps, smoothed, styles[name], plain_text(name))
        ends += [v for values in smoothed for v in values[len(values) // 8 :] if math.isfinite(v)]
        if name != CONTROL and CONTROL in by_name:
            steps, gaps = paired_gaps(results, name, 2 * span)
            mean = _band(bottom, steps, gaps, styles[name], plain_text(name))
            if mean and math.isfinite(mean[-1]):
                labels.append((mean[-1], steps[-1], name))
    if len(set(ends)) > 1:
        margin = 0.05 * (max(ends) - min(ends))
        top.set_ylim(min(ends) - margin, max(ends) + margin)
    top.set_ylabel("training loss (nats per token)")
    if len(by_name) > CROWDED:
        labels = []
        figure.legend(*top.get_legend_handles_labels(), loc="outside right center", frameon=False)
    else:
        top.legend(frameon=False)
    top.set_title(plain_text(title))
    bottom.axhline(0, color="black", lw=1)
    bottom.set_ylabel(f"gap to {CONTROL} (%)")
    several = any(len(losses) > 1 for _, losses in by_name.values())
    bands = "; bands: smallest to largest seed" if several else ""
    bottom.set_xlabel(f"optimizer step (moving averages{bands})")
    _clip_start(bottom, results, span)
    low, high = bottom.get_ylim()
    places = spread([label[0] for label in labels], (high - low) / 15)
    for (_, step, name), place in zip(labels, places):
        bottom.annotate(f" {plain_text(name)}", (step, place), color=styles[name].color, fontsize=8,
                        va="center", annotation_clip=False)  # fmt: skip
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _band(
    axis, steps: list[int], series: list[list[float]], style: Style, label: str
) -> list[float]:
    """Draw mean and range of some curves; returns the mean."""
    if not series:
        return []
    columns = list(zip(*series))
    mean = [statistics.fmean(column) for column in columns]
    steps = steps[: len(mean)]
    axis.plot(steps, mean, color=style.color, ls=style.line, lw=1.5, label=label)
    if len(series) > 1:
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axis.fill_between(steps, low, high, color=style.color, alpha=0.15, lw=0)
    return mean


def _clip_start(axis, results: Sequence[SchemeResult], span: int) -> None:
    """Scale the gap without the first tenth, where losses fall fast and gaps are wild."""
    values = []
    for name in {r.scheme for r in results} - {CONTROL}:
        for gaps in paired_gaps(results, name, 2 * span)[1]:
            values += [v for v in gaps[len(gaps) // 10 :] if math.isfinite(v)]
    if values:
        low, high = min(0.0, *values), max(0.0, *values)
        margin = 0.06 * (high - low) or 1.0
        axis.set_ylim(low - margin, high + margin)


def health_series(result: SchemeResult, tensor: str, stat: str) -> tuple[list[int], list[float]]:
    """Return (steps, mean over layer groups) of one statistic."""
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
    """Draw spectral health over training: a row per tensor, a column per statistic."""
    figure, axes = figure_axes(len(TENSORS), len(HEALTH_PANELS), (16, 8), sharex=True)
    styles = scheme_styles([r.scheme for r in results], CONTROL)
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
