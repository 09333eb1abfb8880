"""Plot gaps to the control on a log2 axis, with one line per variant."""

from __future__ import annotations

import math
from collections.abc import Mapping

from metis_hf.lab.compare.statistics import Interval
from metis_hf.lab.show.figure import scheme_styles, tidy


def plot_gaps(axis, gaps: Mapping[str, Mapping[float, Interval]], ticks: Mapping[float, str]):
    """Draw the gaps of each variant, by place on the axis; a NaN half width draws no interval."""
    styles = scheme_styles(list(gaps))
    for index, (name, points) in enumerate(gaps.items()):
        # Shift each variant, so that intervals do not hide each other.
        x = [place * 1.025 ** (index - len(gaps) / 2) for place in points]
        halves = [0.0 if math.isnan(g.half_width) else g.half_width for g in points.values()]
        axis.errorbar(x, [gap.mean for gap in points.values()], yerr=halves, capsize=2, ms=5,
                      color=styles[name].color, marker=styles[name].marker, ls=styles[name].line,
                      lw=1.2, elinewidth=0.8, label=name)  # fmt: skip
    axis.axhline(0, color="black", lw=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(ticks), list(ticks.values()))
    axis.minorticks_off()
    tidy(axis)
