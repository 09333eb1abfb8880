"""Pictures of a fidelity measurement: what a scheme costs the loss, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence

from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity
from metis_hf.lab.show.figure import (
    MARKER,
    as_png,
    figure_axes,
    name_points,
    plain_text,
    scheme_styles,
)

_LINE = "metis"  # the scheme whose ranks are joined by a line


def cost_figure(results: Sequence[SchemeFidelity], tokens: int) -> bytes | None:
    """Draw loss rise against extra multiply-adds, a point for each scheme; None without points."""
    shown = [r for r in results if not r.note and math.isfinite(r.rise.mean)]
    if not shown:
        return None
    figure, axes = figure_axes(1, 1, (9.5, 6.0))
    axis = axes[0][0]
    styles = scheme_styles(list(dict.fromkeys(r.scheme for r in shown)), repeat=True)
    ranks = sorted((r for r in shown if _is_on_line(r)), key=lambda r: r.cost)
    if len(ranks) > 1:
        axis.plot([r.cost for r in ranks], [r.rise.mean for r in ranks], lw=1.2,
                  color=styles[_LINE].color, zorder=1)  # fmt: skip
    for r in shown:
        style, se = styles[r.scheme], r.rise.se
        axis.errorbar(r.cost, r.rise.mean, yerr=None if math.isnan(se) else se, fmt=style.marker,
                      color=style.color, ms=MARKER, capsize=3, elinewidth=0.8,
                      markeredgecolor="black", markeredgewidth=0.4)  # fmt: skip
    axis.axhline(0, color="black", lw=1)
    axis.axvline(0, color="black", lw=1)
    axis.set_xlabel(f"multiply-adds beyond the three GEMMs (%), {tokens:,} tokens a step")
    axis.set_ylabel("held-out loss above the exact model's (%)")
    axis.margins(0.12, 0.08)
    if max(r.rise.mean for r in shown) > 25:
        axis.set_yscale("symlog", linthresh=5.0)
        axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # settles the scales, which places are taken in
    name_points(axis, [(r.cost, r.rise.mean, plain_text(r.name)) for r in shown])
    return as_png(figure)


def _is_on_line(result: SchemeFidelity) -> bool:
    """Return whether a row is the scheme at some rank, and no config given beside it.

    A config's file may be called as such a row is.
    """
    name = result.name
    return result.scheme == _LINE and (name == _LINE or name.startswith(f"{_LINE}, rank "))


def layers_figure(result: SchemeFidelity) -> bytes:
    """Draw each layer's errors on exact inputs, in the order of the model."""
    figure, axes = figure_axes(2, 1, (9.5, 6.0), sharex=True)
    upper, lower = axes[0][0], axes[1][0]
    values = list(result.layers.values())
    places = range(len(values))
    for kind, color in zip(("input", "weight", "grad_output"), ("#0072B2", "#D55E00", "#009E73")):
        upper.plot(places, [v[kind] for v in values], ".", ms=4, color=color, label=kind)
    for kind, color in zip(("y", "dx", "dw"), ("#0072B2", "#D55E00", "#009E73")):
        lower.plot(places, [v[kind] for v in values], ".", ms=4, color=color, label=kind)
    upper.set_ylabel("SQNR of operands (dB)")
    lower.set_ylabel("relative error of products")
    if any(v[kind] > 0 for v in values for kind in ("y", "dx", "dw")):
        lower.set_yscale("log")
    lower.set_xlabel("layer, in the order of the model")
    for axis in (upper, lower):
        axis.grid(alpha=0.3)
        axis.legend(ncols=3, frameon=False, loc="best")
        axis.spines[["top", "right"]].set_visible(False)
    return as_png(figure)
