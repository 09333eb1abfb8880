"""The style of every figure: axes, a fixed colour for each scheme, names beside points."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

LineStyle: TypeAlias = str | tuple[int, tuple[int, ...]]  # a name, or (offset, lengths of dashes)
# Okabe and Ito's palette, told apart by people with any colour vision; the control is black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
# Seven colors are fewer than the schemes: each round of them has its own lines and markers.
LINES: tuple[LineStyle, ...] = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D", "v")
# A scheme looks the same in every figure: columns are COLORS, rows are LINES and MARKERS.
_FIXED = (
    ("metis", "nvfp4", "nvidia", "metis-paper", "bf16-split", "four-over-six", "averis"),
    ("quartet2", "nvfp4-rne", "nvidia-paper", "quarot", "svdquant", "if4", "averis-hadamard"),
    ("tetrajet2", "mxfp4", "nvidia-unbiased", "quip", "hot-channel", "mixfp4", "halo"),
    ("mean", "mxfp4-hadamard", "smoothquant", "omniquant", "outlier-suppression-plus",
     "four-over-six-unbiased", "occ"),
    ("ufp4", "w4a4", "w4a16"),
)  # fmt: skip
MOST_STYLES = len(COLORS) * len(LINES)
CROWDED = 8  # curves; more have their names outside, and none at their ends
_FONT = 8  # points
MARKER = 7  # points; of the points that are named
# Where a name may stand: distances from its point, in points, nearest first.
_DISTANCES = (9, 16, 26, 38, 52, 70, 92, 118)
_DIRECTIONS = (
    *((1, 0), (1, 0.7), (1, -0.7), (-1, 0), (0, 1), (0, -1), (-1, 0.7), (-1, -0.7)),
    *((1, 1.5), (1, -1.5)),
)

Box = tuple[float, float, float, float]  # left, bottom, right, top in points


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


def _all_styles() -> Iterator[Style]:
    for line, marker in zip(LINES, MARKERS):
        for color in COLORS:
            yield Style(color, line, marker)


_NAMES = [name for row in _FIXED for name in row]
STYLES = {"bf16": Style("black")} | dict(zip(_NAMES, _all_styles()))


def scheme_styles(
    names: Sequence[str], control: str = "bf16", *, repeat: bool = False
) -> dict[str, Style]:
    """Return a style for each scheme or variant of a figure.

    The package's own schemes look the same in every figure, and the control is black. Other names
    get the styles that are left over, in their order.

    Args:
        names: in the order of the figure.
        control: the name that is drawn in black.
        repeat: use styles a second time where there are more names than styles, as in a figure
            with a name beside each point.

    Raises:
        ValueError: more than 35 names beside the control, without `repeat`.
    """
    others = [name for name in dict.fromkeys(names) if name != control]
    if len(others) > MOST_STYLES and not repeat:
        raise ValueError(
            f"{len(others)} schemes in one picture; only {MOST_STYLES} can be told apart. Compare "
            "fewer, or in several directories"
        )
    found = {name: STYLES[name] for name in others if name in STYLES}
    left = [style for style in _all_styles() if style not in found.values()]
    colors = {style.color for style in found.values()}
    left.sort(key=lambda style: (LINES.index(style.line), style.color in colors))
    free = itertools.cycle(left or _all_styles())
    found |= {name: next(free) for name in others if name not in found}
    return {control: Style("black")} | {name: found[name] for name in others}


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


def name_points(axis, points: Sequence[tuple[float, float, str]]) -> None:
    """Write each name (x, y, name) where it covers no point, no other name and no axis.

    Names may go beyond the right and the upper edge of the plot, where nothing is written.
    """
    scale = 72 / axis.figure.dpi
    places = [tuple(scale * v for v in axis.transData.transform((x, y))) for x, y, _ in points]
    half = MARKER / 2 + 1
    taken: list[Box] = [(x - half, y - half, x + half, y + half) for x, y in places]
    left, bottom, *_ = (scale * v for v in axis.get_window_extent().extents)
    taken += [(-math.inf, -math.inf, left, math.inf), (-math.inf, -math.inf, math.inf, bottom)]
    for (x, y, name), (px, py) in zip(points, places):
        offset, box = next(_free(px, py, name, taken))
        taken.append(box)
        far = math.hypot(*offset) > 1.5 * _DISTANCES[0]
        axis.annotate(
            name, (x, y), offset, textcoords="offset points", fontsize=_FONT, va="center",
            ha="left" if offset[0] > 0 else "right" if offset[0] < 0 else "center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.6"} if far else None,
        )  # fmt: skip


def _free(
    x: float, y: float, name: str, taken: Sequence[Box]
) -> Iterator[tuple[tuple[float, float], Box]]:
    """Return (offset, box) of free places for a name beside a point, and of the last anyway."""
    width, height = 0.58 * _FONT * len(name), 1.25 * _FONT
    for distance, (right, up) in itertools.product(_DISTANCES, _DIRECTIONS):
        dx, dy = distance * right, distance * up
        left = x + dx - (0 if right > 0 else width if right < 0 else width / 2)
        box = (left, y + dy - height / 2, left + width, y + dy + height / 2)
        if not any(_overlap(box, other) for other in taken):
            yield (dx, dy), box
    yield (dx, dy), box


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
