"""Figures of a fidelity measurement: KL against cost, and the errors of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity
from metis_hf.lab.show.figure import (
    COLORS,
    Point,
    as_png,
    figure_axes,
    scatter_figure,
    scheme_styles,
    tidy,
)

_LINE = "metis"  # the scheme whose ranks are joined by a line


def cost_figure(results: Sequence[SchemeFidelity], model: str, tokens: int) -> bytes | None:
    """Draw KL against extra multiply-adds, a point for each scheme; None without points."""
    shown = [r for r in results if not r.note and math.isfinite(r.kl_in_training.mean)]
    if not shown:
        return None
    styles = scheme_styles([r.scheme for r in shown], repeat=True)
    points = [
        Point(r.cost, r.kl_in_training.mean, r.name, styles[r.scheme], r.kl_in_training.se)
        for r in shown
    ]
    # A config file may have such a name too, so the scheme is checked as well.
    is_rank = [
        r.scheme == _LINE and (r.name == _LINE or r.name.startswith(f"{_LINE}, rank "))
        for r in shown
    ]
    return scatter_figure(
        points,
        f"extra multiply-adds, as % of the three GEMMs, at {tokens:,} tokens per step",
        "KL from the exact model (nats per token)",
        title=f"{model} in four bits, nothing trained",
        joined=[point for point, joined in zip(points, is_rank) if joined],
    )


def layers_figure(result: SchemeFidelity, model: str) -> bytes:
    """Draw each layer's errors on exact inputs, in the order of the model."""
    figure, ((upper,), (lower,)) = figure_axes(2, 1, (9.5, 6.0), sharex=True)
    values = list(result.layers.values())
    for axis, kinds in ((upper, ("input", "weight", "grad_output")), (lower, ("y", "dx", "dw"))):
        for kind, color in zip(kinds, COLORS):
            heights = [value[kind] for value in values]
            axis.plot(range(len(values)), heights, ".", ms=4, color=color, label=kind)
        axis.legend(ncols=3, loc="best")
    upper.set_ylabel("SQNR of operands (dB)")
    lower.set(ylabel="relative error of products", xlabel="layer, in the order of the model")
    if any(value[kind] > 0 for value in values for kind in ("y", "dx", "dw")):
        lower.set_yscale("log")
    tidy(upper, lower)
    return as_png(figure, f"{model}: each layer in {result.name}")
