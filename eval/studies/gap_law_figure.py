"""Draw the figure of gap_law.py: gaps by tokens per parameter, and ours next to the law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metis_hf.lab.show.figure import (
    COLORS,
    MARKER,
    MARKERS,
    as_png,
    figure_axes,
    scheme_styles,
    tidy,
)

Law = Callable[[Any, np.ndarray], np.ndarray]  # a point, ratios of tokens to parameters -> gaps


def draw(
    record: dict[str, Any], points: Sequence[Any], power: Law, curved: Law, path: Path
) -> None:
    """Draw the published grid with both forms of the law, and our gaps next to the law's.

    The record is of `gap_law.study`; the points are means over schemes at each size and number of
    tokens.
    """
    figure, ((published, ours),) = figure_axes(1, 2, (9.5, 4.8))
    tidy(published, ours)
    _published(published, points, power, curved)
    published.set_title(f"{record['published schemes']} published schemes, mean")
    _ours(ours, record["extrapolated"])
    ours.set_title(f"ours, at {record['parameters extrapolated to'] / 1e6:.2f}M parameters")
    path.write_bytes(as_png(figure, "Gap as a law of size and tokens: Quartet II's grid and ours"))


def _published(axis, points: Sequence[Any], power: Law, curved: Law) -> None:
    sizes = sorted({point.parameters for point in points})
    for size, color, marker in zip(sizes, COLORS, MARKERS):
        here = [point for point in points if point.parameters == size]
        ratios = np.geomspace(here[0].ratio, here[-1].ratio, 50)
        for law, line in ((power, ":"), (curved, "-")):
            axis.plot(ratios, law(here[0], ratios), line, color=color, lw=1.2)
        axis.plot([p.ratio for p in here], [p.gap for p in here], marker, color=color, ms=MARKER,
                  markeredgecolor="black", markeredgewidth=0.4,
                  label=f"{size / 1e6:.0f}M")  # fmt: skip
    axis.plot([], [], "k:", lw=1.2, label="power law")
    axis.plot([], [], "k-", lw=1.2, label="with curvature")
    _logarithmic(axis, [25, 50, 100, 200, 400, 800], [1.5, 2, 2.5, 3])
    axis.legend(title="parameters")
    axis.set_xlabel("tokens per parameter")
    axis.set_ylabel("held-out loss above bf16 (%)")


def _ours(axis, extrapolated: dict[str, Any]) -> None:
    seeds = " or ".join(map(str, sorted({found["seeds"] for found in extrapolated.values()})))
    styles = scheme_styles(list(extrapolated))
    for row, (name, found) in enumerate(extrapolated.items()):
        law, style = found["law"], styles[name]
        axis.errorbar(law, row + 0.12, xerr=[[law - found["low"]], [found["high"] - law]],
                      fmt="|", color="0.5", capsize=3, ms=2 * MARKER,
                      label="" if row else "law of the grid, for one new run")  # fmt: skip
        axis.errorbar(found["ours"], row - 0.12, xerr=found["half_width"], fmt=style.marker,
                      capsize=3, ms=MARKER, color=style.color)  # fmt: skip
    axis.errorbar([], [], xerr=[], fmt="s", color="black", label=f"ours, {seeds} seeds")
    axis.set_yticks(range(len(extrapolated)), list(extrapolated))
    axis.set_ylim(-0.6, len(extrapolated) + 0.3)
    axis.set_xlim(0, None)
    axis.set_xlabel("held-out loss above bf16 (%), 95 % intervals")
    axis.legend(loc="upper left")


def _logarithmic(axis, x: Sequence[float], y: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log")
    axis.set_yscale("log")
    for along, ticks in ((axis.xaxis, x), (axis.yaxis, y)):
        along.set_major_locator(NullLocator())
        along.set_minor_locator(NullLocator())
        along.set_ticks(ticks)
        along.set_major_formatter("{x:g}")
