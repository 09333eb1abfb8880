"""The picture of loss against cost: a point per variant, each with its name beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from metis_hf.lab.compare.statistics import Summary
from metis_hf.lab.cost import TOKENS
from metis_hf.lab.show.figure import MARKER, Style, figure_axes, name_points, plain_text
from metis_hf.schemes import CONTROL

_FAR = 4.0  # times the median gap: beyond, a linear scale would show little else
_TICKS = (-10, -5, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)


def plot_costs(
    summaries: Sequence[Summary], styles: Mapping[str, Style], path: Path, title: str
) -> None:
    """Draw final held-out gaps against the multiply-adds beyond the three GEMMs.

    Nothing is drawn without the control, or where no multiply-adds were counted.
    """
    control = next((s for s in summaries if s.name == CONTROL), None)
    measured = [s for s in summaries if s.gap is not None and math.isfinite(s.gap.mean)]
    shown = [s for s in measured if math.isfinite(s.extra)]
    if control is None or not shown:
        return
    figure, axes = figure_axes(1, 1, (9.5, 6.5))
    axis = axes[0][0]
    points = []
    for summary in shown:
        assert summary.gap is not None
        cost, width, style = summary.extra, summary.gap.half_width, styles[summary.name]
        axis.errorbar(cost, summary.gap.mean, yerr=None if math.isnan(width) else width,
                      fmt=style.marker, color=style.color, ms=MARKER, capsize=3, lw=1.2,
                      elinewidth=0.8, markeredgecolor="black", markeredgewidth=0.4)  # fmt: skip
        points.append((cost, summary.gap.mean, plain_text(summary.name)))
    axis.axhline(0, color="black", lw=1)
    axis.set_title(plain_text(title))
    axis.set_ylabel(f"held-out loss above {CONTROL} (%): mean, 95 % interval")
    axis.set_xlabel(f"multiply-adds beyond the three GEMMs (%), {TOKENS:,} tokens a step")
    axis.margins(0.12, 0.06)
    if max(gaps := [abs(y) for _, y, _ in points]) > _FAR * statistics.median(gaps):
        _compress(axis)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # settles the scales, which places are taken in
    name_points(axis, points)
    figure.savefig(path)


def _compress(axis) -> None:
    """Map linearly to 1 %, by logarithms beyond: one far point leaves room for others."""
    from matplotlib.ticker import NullLocator

    axis.set_yscale("symlog", linthresh=1.0)
    axis.set_yticks([tick for tick in _TICKS if axis.get_ylim()[0] <= tick <= axis.get_ylim()[1]])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
