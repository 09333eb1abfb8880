"""Parts of every figure: axes without a display, a palette, styles of many curves."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

LineStyle: TypeAlias = str | tuple[int, tuple[int, ...]]  # a name, or (offset, lengths of dashes)
# Okabe and Ito's palette, told apart by people with any colour vision; the control is black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
# Seven colors are fewer than the schemes: each round of them has its own lines and markers.
LINES: tuple[LineStyle, ...] = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D", "v")
MOST_STYLES = len(COLORS) * len(LINES)
CROWDED = 8  # curves; more have their names outside, and none at their ends


def figure_axes(rows: int, columns: int, size: tuple[float, float], **kwargs):
    """Return a figure and its axes [rows columns]; size in inches, kwargs as `Figure.subplots`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def as_png(figure: Any) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@dataclass(frozen=True)
class Style:
    """Color, line and marker of a scheme; no two of a picture share all three."""

    color: str
    line: LineStyle = "-"
    marker: str = "o"


def scheme_styles(names: Sequence[str], control: str) -> dict[str, Style]:
    """Return a style for each scheme or variant, in their order; black for the control.

    Raises:
        ValueError: more than the 35 others that can be told apart.
    """
    others = [name for name in names if name != control]
    rounds = list(zip(LINES, MARKERS))
    if len(others) > MOST_STYLES:
        raise ValueError(
            f"{len(others)} schemes in one picture; only {MOST_STYLES} can be told apart. Compare "
            "fewer, or in several directories"
        )
    styles = [Style(color, *round_) for round_ in rounds for color in COLORS]
    return {control: Style("black")} | dict(zip(others, styles))


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Return the centred moving average over at most `span` values, shorter at the ends."""
    half = span // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def spread(places: Sequence[float], distance: float) -> list[float]:
    """Move label positions apart, upwards from the lowest, in their order by height."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for below, above in itertools.pairwise(order):
        moved[above] = max(moved[above], moved[below] + distance)
    return moved


def plain_text(text: str) -> str:
    """Return a text that matplotlib draws as it is: no formula, no legend entry that is hidden."""
    shown = "".join(c if c.isprintable() else "?" for c in text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
