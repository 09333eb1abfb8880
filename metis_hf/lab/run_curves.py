"""Curves of several runs: training losses above the control's, and held-out losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from metis_hf.lab.compare.loss_figures import not_drawn, telling
from metis_hf.lab.compare.statistics import gaps_percent
from metis_hf.lab.run_records import RunRecord
from metis_hf.lab.show.figure import (
    Line,
    as_png,
    draw_lines,
    figure_axes,
    plain_text,
    scheme_styles,
    shared_legend,
    smooth,
    tidy,
)
from metis_hf.schemes import CONTROL

HELD_OUT = "eval_loss"  # as Trainer logs it
_END = 10  # the gap at the end is the mean over the last 1/10 of the steps


@dataclass(frozen=True)
class Gaps:
    """The gaps of a run to its control, in percent of the control's loss."""

    steps: list[int]  # steps at which both runs logged a training loss
    training: list[float]  # the gap at each of `steps`; NaN where a loss is not finite
    held_out: float  # at the last step at which both runs were evaluated; NaN without one

    @property
    def at_end(self) -> float:
        """The mean training gap over the last tenth of the steps; NaN without steps."""
        last = self.training[-max(1, len(self.training) // _END) :]
        return statistics.fmean(last) if last else math.nan


def gaps_to_control(run: RunRecord, runs: Sequence[RunRecord]) -> Gaps | None:
    """Return the gaps of a run to the control with its seed, else to the first control.

    Returns None for a control, or if there is no control among the runs.
    """
    controls = [one for one in runs if one.config.get("scheme") == CONTROL]
    if not controls or run in controls:
        return None
    alike = (one for one in controls if one.config.get("seed") == run.config.get("seed"))
    control = next(alike, controls[0])
    training, held_out = (
        gaps_percent(dict(zip(*run.series(name))), dict(zip(*control.series(name))))
        for name in ("loss", HELD_OUT)
    )
    return Gaps([*training], [*training.values()], next(reversed(held_out.values()), math.nan))


def curves_figure(runs: Sequence[RunRecord]) -> bytes | None:
    """Draw training gaps and held-out losses by step, as a PNG; None without either."""
    gaps = {run.name: found for run in runs if (found := gaps_to_control(run, runs)) is not None}
    longest = max(run.last_step for run in runs)
    ends = {  # NaN, so left out first, for runs up to half as long as the longest
        run.name: losses[-1] if losses and 2 * run.last_step > longest else math.nan
        for run in runs
        for losses in [run.series("loss")[1]]
    }
    controls = [run.name for run in runs if run.config.get("scheme") == CONTROL]
    drawn = telling(ends, controls[:1])
    # The first run of a scheme gets the scheme's style.
    first: dict[str, str] = {}
    for run in runs:
        first.setdefault(str(run.config.get("scheme")), run.name)
    keys = {run.name: run.name for run in runs} | {name: s for s, name in first.items()}
    styles = scheme_styles(list(keys.values()), repeat=True)
    above, held_out = [], []
    for run in runs:
        style = styles[keys[run.name]]
        if run.name in gaps and run.name in drawn and gaps[run.name].steps:
            found = gaps[run.name]
            span = max(1, len(found.steps) // 10)
            above.append(Line(run.name, found.steps, smooth(found.training, span), style))
        steps, losses = run.series(HELD_OUT)
        if steps and run.name in drawn:
            held_out.append(Line(run.name, steps, losses, style, points=True))
    labeled = (
        (above, f"training loss above {CONTROL} (%)"),
        (held_out, "held-out loss (nats per token)"),
    )
    panels = [(lines, label) for lines, label in labeled if lines]
    if not panels:
        return None
    figure, axes = figure_axes(len(panels), 1, (9.5, 1 + 3.2 * len(panels)), sharex=True)
    for axis, (lines, label) in zip(axes[:, 0], panels):
        draw_lines(axis, lines)
        axis.set_ylabel(label)
        if lines is above:
            axis.axhline(0, color="black", lw=1)
    axes[-1, 0].set_xlabel("optimizer step" + not_drawn(ends, drawn))
    tidy(*axes.flat)
    shared_legend(figure, axes.flat)
    models = dict.fromkeys(run.model for run in runs if run.model)
    return as_png(figure, plain_text(", ".join(models)) or "Training runs")
