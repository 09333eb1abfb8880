"""The picture of final gaps: a dot for each seed, mean and interval for each variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.compare.statistics import Summary
from metis_hf.lab.compare.tasks_table import gaps_percent
from metis_hf.lab.show.figure import Style, figure_axes, plain_text
from metis_hf.schemes import CONTROL


def plot_gaps(
    summaries: Sequence[Summary],
    results: Sequence[SchemeResult],
    styles: Mapping[str, Style],
    path: Path,
) -> None:
    """Draw final held-out gaps: a dot for each seed, mean and 95 % interval of each variant."""
    shown = [s for s in summaries if s.gap is not None]
    figure, axes = figure_axes(1, 1, (8, 1.3 + 0.42 * len(shown)))
    axis = axes[0][0]
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
    axis.set_yticks(range(len(shown)), [plain_text(s.name) for s in reversed(shown)])
    axis.set_ylim(-0.6, len(shown) - 0.4)
    axis.set_xlabel(
        f"held-out loss above {CONTROL} (%), paired by seed\n"
        "pale: seeds; large: mean with 95 % interval"
    )
    axis.grid(alpha=0.3, axis="x")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
