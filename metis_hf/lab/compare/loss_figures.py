"""Figures of a comparison: curves with the gap over time, final gaps, gaps against costs."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.compare.statistics import Summary, gaps_percent
from metis_hf.lab.cost import TOKENS
from metis_hf.lab.show.figure import (
    Line,
    Point,
    Style,
    draw_lines,
    figure_axes,
    plain_text,
    scatter_figure,
    scheme_styles,
    shared_legend,
    smooth,
    tidy,
)
from metis_hf.schemes import CONTROL

_CURVES = 6  # per figure; more cannot be told apart


def plot_all(
    summaries: Sequence[Summary],
    results: Sequence[SchemeResult],
    out: Path,
    title: str,
    reference: str | None = None,
) -> None:
    """Draw the three figures into a directory; without gaps only the curves remain.

    Every figure has the title. The curve of the variant `reference` is always drawn.
    """
    plot_curves(results, out / "loss.png", title, reference)
    for name in ("gap.png", "cost.png"):  # earlier ones, which may not be drawn again
        (out / name).unlink(missing_ok=True)
    if any(summary.gap is not None for summary in summaries):
        # The styles of the curves, whatever the order of the table.
        styles = scheme_styles([result.scheme for result in results])
        plot_gaps(summaries, results, styles, out / "gap.png", title)
        plot_costs(summaries, styles, out / "cost.png", title)


def curves(results: Sequence[SchemeResult]) -> dict[str, tuple[list[int], list[list[float]]]]:
    """Return variant -> (steps, the training losses of each seed at these steps)."""
    found: dict[str, list[dict[int, float]]] = {}
    for result in results:
        found.setdefault(result.scheme, []).append(_losses(result))
    return {name: _at_common_steps(losses) for name, losses in found.items()}


def paired_gaps(
    results: Sequence[SchemeResult], name: str, span: int
) -> tuple[list[int], list[list[float]]]:
    """Return (steps, smoothed gaps to the control in percent for each common seed)."""
    control = {r.seed: _losses(r) for r in results if r.scheme == CONTROL}
    steps, values = _at_common_steps(
        [
            gaps_percent(_losses(result), control[result.seed])
            for result in results
            if result.scheme == name and result.seed in control
        ]
    )
    return steps, [smooth(each, span) for each in values]


def _losses(result: SchemeResult) -> dict[int, float]:
    return {int(entry["step"]): entry["loss"] for entry in result.history}


def _at_common_steps(series: Sequence[dict[int, float]]) -> tuple[list[int], list[list[float]]]:
    """Return (steps that all series have, values of each series at these steps)."""
    steps = sorted(set.intersection(*map(set, series))) if series else []
    return steps, [[values[step] for step in steps] for values in series]


def telling(losses: Mapping[str, float], always: Container[str | None]) -> list[str]:
    """Return the names whose curves a figure shows, at most six, in the order of `losses`.

    All of `always` are included. The others are evenly spread from the lowest to the highest loss;
    diverged ones are left out first.
    """
    others = [name for name in losses if name not in always]
    others.sort(key=lambda name: (not math.isfinite(losses[name]), losses[name]))
    room = _CURVES - (len(losses) - len(others))
    if len(others) > room:
        finite = [name for name in others if math.isfinite(losses[name])]
        others = finite if len(finite) >= room else others[:room]
        others = [others[round(i * (len(others) - 1) / (room - 1))] for i in range(room)]
    return [name for name in losses if name in always or name in others]


def not_drawn(names: Iterable[str], drawn: Container[str]) -> str:
    """Return a line that names the curves a figure leaves out; empty if it shows all."""
    left = [plain_text(name) for name in names if name not in drawn]
    return "\n" + textwrap.fill(f"only in the table: {', '.join(left)}", 80) if left else ""


def plot_curves(
    results: Sequence[SchemeResult], path: Path, title: str, reference: str | None = None
) -> None:
    """Draw training loss by step, and the paired gap to the control; bands span the seeds.

    The figure shows the variants that `telling` selects, and names the others.
    """
    figure, axes = figure_axes(2, 1, (8.5, 7.5), sharex=True, height_ratios=[3, 2.4])
    (top,), (bottom,) = axes
    ends: dict[str, list[float]] = {}
    for result in results:
        ends.setdefault(result.scheme, []).append(result.loss)
    styles = scheme_styles(list(ends))
    means = {name: statistics.fmean(losses) for name, losses in ends.items()}
    drawn = telling(means, (CONTROL, reference))
    results = [result for result in results if result.scheme in drawn]
    by_name = curves(results)
    span = max(1, max(len(steps) for steps, _ in by_name.values()) // 20)
    losses = {
        name: (steps, [smooth(values, span) for values in series])
        for name, (steps, series) in by_name.items()
    }
    gaps = {name: paired_gaps(results, name, 2 * span) for name in by_name if name != CONTROL}
    draw_lines(top, [_mean(name, *found, styles[name]) for name, found in losses.items()])
    draw_lines(
        bottom, [_mean(name, *found, styles[name]) for name, found in gaps.items() if found[1]]
    )
    if len(late := _after_start((series for _, series in losses.values()), 8)) > 1:
        margin = 0.05 * (max(late) - min(late))
        top.set_ylim(min(late) - margin, max(late) + margin)
    if values := _after_start((series for _, series in gaps.values()), 10):
        low, high = min(0.0, *values), max(0.0, *values)
        margin = 0.06 * (high - low) or 1.0
        bottom.set_ylim(low - margin, high + margin)
    bottom.axhline(0, color="black", lw=1)
    several = any(len(series) > 1 for _, series in by_name.values())
    bands = "; bands: smallest to largest seed" if several else ""
    top.set(ylabel="training loss (nats per token)", title=plain_text(title))
    label = f"optimizer step (moving averages{bands})"
    label += not_drawn(means, drawn)
    bottom.set(ylabel=f"training loss above {CONTROL} (%)", xlabel=label)
    tidy(top, bottom)
    shared_legend(figure, [top])
    figure.savefig(path)


def _mean(label: str, steps: list[int], series: list[list[float]], style: Style) -> Line:
    """Return the mean of several curves, with a band over their range."""
    columns = list(zip(*series))
    band = ([min(c) for c in columns], [max(c) for c in columns]) if len(series) > 1 else None
    return Line(label, steps, [statistics.fmean(c) for c in columns], style, band)


def _after_start(parts: Iterable[list[list[float]]], share: int) -> set[float]:
    """Return the finite values of curves without the first 1/share, in which losses fall fast."""
    found = (v for series in parts for values in series for v in values[len(values) // share :])
    return set(filter(math.isfinite, found))


def plot_gaps(
    summaries: Sequence[Summary],
    results: Sequence[SchemeResult],
    styles: Mapping[str, Style],
    path: Path,
    title: str,
) -> None:
    """Draw final held-out gaps: a dot for each seed, mean and 95 % interval of each variant."""
    shown = [s for s in summaries if s.gap is not None]
    figure, ((axis,),) = figure_axes(1, 1, (8, 1.6 + 0.42 * len(shown)))
    base = {r.seed: r.loss for r in results if r.scheme == CONTROL}
    for place, summary in enumerate(reversed(shown)):
        assert summary.gap is not None
        style = styles[summary.name]
        gaps = list(gaps_percent(summary.losses, base).values())
        axis.plot(gaps, [place] * len(gaps), style.marker, color=style.color, alpha=0.4, ms=5)
        width = summary.gap.half_width
        axis.errorbar(summary.gap.mean, place, xerr=None if math.isnan(width) else width,
                      fmt=style.marker, color=style.color, ms=8, capsize=4, lw=1.6)  # fmt: skip
    axis.axvline(0, color="black", lw=1)
    names = [textwrap.fill(plain_text(s.name), 30) for s in reversed(shown)]
    axis.set_yticks(range(len(shown)), names)
    axis.set_ylim(-0.6, len(shown) - 0.4)
    figure.suptitle(plain_text(title))
    axis.set_xlabel(
        f"held-out loss above {CONTROL} (%), paired by seed\n"
        "pale: seeds; large: mean with 95 % interval"
    )
    tidy(axis)
    axis.grid(visible=False, axis="y")
    figure.savefig(path)


def plot_costs(
    summaries: Sequence[Summary], styles: Mapping[str, Style], path: Path, title: str
) -> None:
    """Draw final held-out gaps against the multiply-adds beyond the three GEMMs.

    Nothing is drawn without the control, or where no multiply-adds were counted.
    """
    points = [
        Point(s.extra, s.gap.mean, s.name, styles[s.name], s.gap.half_width)
        for s in summaries
        if s.gap is not None and math.isfinite(s.gap.mean) and math.isfinite(s.extra)
    ]
    if not points or not any(s.name == CONTROL for s in summaries):
        return
    path.write_bytes(
        scatter_figure(
            points,
            f"multiply-adds beyond the three GEMMs (%), {TOKENS:,} tokens a step",
            f"held-out loss above {CONTROL} (%): mean, 95 % interval",
            title=title,
        )
    )
