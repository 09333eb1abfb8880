"""The common style of figures: axes, a fixed color per scheme, names next to points."""

from __future__ import annotations

import io
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from metis_hf.schemes import CONTROL

LineStyle: TypeAlias = str | tuple[int, tuple[int, ...]]  # a name, or (offset, lengths of dashes)
# Okabe and Ito's palette, distinguishable with any color vision; the control is black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
# Paul Tol's muted palette, for names that are not schemes of the package.
_OTHERS = ("#332288", "#117733", "#882255", "#999933", "#CC6677", "#44AA99", "#AA4499")
# There are more schemes than colors: each pass through the colors has its own line and marker.
LINES: tuple[LineStyle, ...] = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D", "v")
# Fixed styles: columns are COLORS, rows are LINES and MARKERS.
_FIXED = (
    ("metis", "nvfp4", "nvidia", "metis-paper", "bf16-split", "four-over-six", "averis"),
    ("quartet2", "nvfp4-rne", "nvidia-paper", "quarot", "svdquant", "if4", "averis-hadamard"),
    ("tetrajet2", "mxfp4", "nvidia-unbiased", "quip", "hot-channel", "mixfp4", "halo"),
    ("mean", "mxfp4-hadamard", "smoothquant", "omniquant", "outlier-suppression-plus",
     "four-over-six-unbiased", "occ"),
    ("ufp4", "w4a4", "w4a16", "metis-released", "mean-released"),
)  # fmt: skip
MOST_STYLES = len(COLORS) * len(LINES)
_FONT = 10  # points: 12 pixels where a figure of 9.5 inches is 840 pixels wide, as on GitHub
MARKER = 7  # points; marker size of named points
ALARM = "#D0021B"  # marks NaN and infinity; no scheme has this color
_MISSING = "#b8bcc2"
_FAR = 4.0  # times the median height: a farther point would flatten all others on a linear scale
_TICKS = (-10, -5, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)
# Candidate positions of a name: distances from its point, in points, nearest first.
_DISTANCES = (9, 16, 26, 38, 52, 70, 92, 118)
_DIRECTIONS = (
    *((1, 0), (1, 0.7), (1, -0.7), (-1, 0), (0, 1), (0, -1), (-1, 0.7), (-1, -0.7)),
    *((1, 1.5), (1, -1.5)),
)

Box = tuple[float, float, float, float]  # left, bottom, right, top in points


def figure_axes(rows: int, columns: int, size: tuple[float, float], **kwargs):
    """Return a figure and its axes [rows columns]; size in inches, kwargs for `Figure.subplots`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def as_png(figure: Any, title: str = "") -> bytes:
    """Return a figure, with a title above all axes, as the bytes of a PNG file."""
    if title:
        figure.suptitle(plain_text(title))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def tidy(*axes: Any) -> None:
    """Give axes a pale grid and remove the top and right spines."""
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)


def shared_legend(figure: Any, axes: Iterable[Any], columns: int = 8) -> None:
    """Draw one legend for all axes, below them."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    if found:
        widest = 0.095 * (max(map(len, found)) + 7)  # inches per entry, with its line
        columns = max(1, min(columns, int(figure.get_figwidth() / widest)))
        figure.legend(found.values(), found, loc="outside lower center", ncols=columns,
                      frameon=False)  # fmt: skip


@dataclass(frozen=True)
class Style:
    """Color, line and marker of a scheme; no two schemes in a figure share all three."""

    color: str
    line: LineStyle = "-"
    marker: str = "o"


def _all_styles(colors: Sequence[str]) -> Iterator[Style]:
    for line, marker in zip(LINES, MARKERS):
        for color in colors:
            yield Style(color, line, marker)


_NAMES = [name for row in _FIXED for name in row]
STYLES = {CONTROL: Style("black")} | dict(zip(_NAMES, _all_styles(COLORS)))


def scheme_styles(names: Sequence[str], *, repeat: bool = False) -> dict[str, Style]:
    """Return a style for each scheme or variant of a figure.

    The package's schemes look the same in every figure, and the control is black. Other names get
    styles from another palette, in order.

    Args:
        names: in the order of the figure.
        repeat: reuse styles if there are more names than styles, as in a figure that prints a name
            next to each point.

    Raises:
        ValueError: there are more than 35 names besides the control, without `repeat`.
    """
    others = [name for name in dict.fromkeys(names) if name != CONTROL]
    if len(others) > MOST_STYLES and not repeat:
        raise ValueError(
            f"one figure cannot show {len(others)} schemes, because only {MOST_STYLES} can be "
            "told apart; compare fewer schemes, or use several output directories"
        )
    free = itertools.cycle(_all_styles(_OTHERS))
    found = {name: STYLES.get(name) or next(free) for name in others}
    return {CONTROL: STYLES[CONTROL]} | found


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Return the centered moving average over 2 * (span // 2) + 1 values, fewer at the ends."""
    half = span // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def plain_text(text: str) -> str:
    """Escape text for matplotlib: "$" starts no formula, a leading "_" hides no legend entry."""
    shown = "".join(c if c.isprintable() else "?" for c in text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def short_model(path: str, parts: int = 2) -> str:
    """Return the last `parts` parts of a path, without a run's trailing `/model`."""
    return "/".join(path.rstrip("/").removesuffix("/model").split("/")[-parts:])


def short_models(paths: Iterable[str]) -> dict[str, str]:
    """Return path -> its last parts, as many as make all names unique; else the whole path."""
    paths = list(paths)
    for parts in range(2, max(path.count("/") for path in paths) + 2):
        names = {path: short_model(path, parts) for path in paths}
        if len(set(names.values())) == len(names):
            return names
    return {path: path for path in paths}


def name_points(axis, points: Sequence[tuple[float, float, str]]) -> None:
    """Write each name (x, y, name) inside the plot so that it covers no point or other name."""
    scale = 72 / axis.figure.dpi
    places = [tuple(scale * v for v in axis.transData.transform((x, y))) for x, y, _ in points]
    half = MARKER / 2 + 1
    taken: list[Box] = [(x - half, y - half, x + half, y + half) for x, y in places]
    left, bottom, right, top = (scale * v for v in axis.get_window_extent().extents)
    far = math.inf
    taken += [(-far, -far, left, far), (right, -far, far, far)]
    taken += [(-far, -far, far, bottom), (-far, top, far, far)]
    for (x, y, name), (px, py) in zip(points, places):
        offset, box = next(_free(px, py, name, taken))
        taken.append(box)
        away = math.hypot(*offset) > 1.5 * _DISTANCES[0]
        axis.annotate(
            name, (x, y), offset, textcoords="offset points", fontsize=_FONT, va="center",
            ha="left" if offset[0] > 0 else "right" if offset[0] < 0 else "center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.6"} if away else None,
        )  # fmt: skip


def _free(
    x: float, y: float, name: str, taken: Sequence[Box]
) -> Iterator[tuple[tuple[float, float], Box]]:
    """Yield (offset, box) of each free position for a name, then the last position in any case."""
    width, height = 0.62 * _FONT * len(name), 1.25 * _FONT
    for distance, (right, up) in itertools.product(_DISTANCES, _DIRECTIONS):
        dx, dy = distance * right, distance * up
        left = x + dx - (0 if right > 0 else width if right < 0 else width / 2)
        box = (left, y + dy - height / 2, left + width, y + dy + height / 2)
        if not any(_overlap(box, other) for other in taken):
            yield (dx, dy), box
    yield (dx, dy), box


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@dataclass(frozen=True)
class Line:
    """A curve."""

    label: str  # legend text; empty for none
    x: Sequence[float]
    y: Sequence[float]
    style: Style = Style(COLORS[0])
    band: tuple[Sequence[float], Sequence[float]] | None = None  # lower and upper edge, drawn pale
    points: bool | str = False  # show markers; "only" omits the line


def draw_lines(axis: Any, lines: Iterable[Line]) -> None:
    """Draw curves with their bands and markers; labels are drawn literally."""
    for line in lines:
        style = line.style
        axis.plot(line.x, line.y, lw=1.5, color=style.color, label=plain_text(line.label),
                  ls="none" if line.points == "only" else style.line,
                  marker=style.marker if line.points else None, ms=3)  # fmt: skip
        if line.band is not None:
            axis.fill_between(line.x, *line.band, color=style.color, alpha=0.15, lw=0)


@dataclass(frozen=True)
class Point:
    """A named point; `error` is half the length of its error bar, NaN draws none."""

    x: float
    y: float
    name: str
    style: Style
    error: float = math.nan


def scatter_figure(
    points: Sequence[Point],
    x_label: str,
    y_label: str,
    *,
    title: str = "",
    joined: Sequence[Point] = (),
) -> bytes:
    """Draw named points with error bars; far outliers make y logarithmic beyond the other points.

    At least one point is needed. A line connects the points `joined` in order of x. Returns a PNG.
    """
    figure, ((axis,),) = figure_axes(1, 1, (9.5, 6.5))
    if len(joined) > 1:
        line = sorted(joined, key=lambda point: point.x)
        axis.plot([p.x for p in line], [p.y for p in line], lw=1.2, color=line[0].style.color,
                  zorder=1)  # fmt: skip
    for p in points:
        axis.errorbar(p.x, p.y, yerr=None if math.isnan(p.error) else p.error, fmt=p.style.marker,
                      color=p.style.color, ms=MARKER, capsize=3, elinewidth=0.8,
                      markeredgecolor="black", markeredgewidth=0.4)  # fmt: skip
    axis.axhline(0, color="black", lw=1)
    axis.axvline(0, color="black", lw=1)
    axis.set(xlabel=x_label, ylabel=y_label, title=plain_text(title))
    axis.margins(0.12, 0.06)
    heights = [abs(p.y) for p in points]
    if max(heights) > _FAR * (median := statistics.median(heights)) > 0:
        _compress(axis, 10 ** round(math.log10(median)))
    tidy(axis)
    figure.draw_without_rendering()  # fixes the scales that name placement needs
    name_points(axis, [(p.x, p.y, plain_text(p.name)) for p in points])
    return as_png(figure)


def _compress(axis: Any, unit: float) -> None:
    """Make y linear up to `unit` and logarithmic beyond, so that outliers leave room for others."""
    from matplotlib.ticker import NullLocator

    axis.set_yscale("symlog", linthresh=unit)
    low, high = axis.get_ylim()
    axis.set_yticks([unit * tick for tick in _TICKS if low <= unit * tick <= high])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())


def heat_map(
    axis: Any,
    values: Any,
    norm: Any,
    *,
    colors: str = "viridis",
    crosses: Any = None,
    text: str = "",
) -> Any:
    """Draw a matrix as colors; NaN is gray. Return the image, for `Figure.colorbar`.

    Args:
        values: [rows columns].
        norm, colors: matplotlib's norm for the color map, and the map's name.
        crosses: [rows columns], True where a red cross marks NaN or infinity.
        text: format of the number written into each cell, such as ".0%"; empty for none.
    """
    import numpy as np

    axis.set_facecolor(_MISSING)
    image = axis.imshow(values, aspect="auto", interpolation="nearest", norm=norm, cmap=colors)
    if crosses is not None and np.any(crosses):
        y, x = np.nonzero(crosses)
        axis.scatter(x, y, marker="x", color=ALARM, s=22, lw=1.4)
    for (row, column), value in np.ndenumerate(values) if text else ():
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            axis.text(column, row, format(value, text), ha="center", va="center", fontsize=_FONT,
                      color="white" if dark else "black")  # fmt: skip
    axis.tick_params(length=2, labelsize=_FONT)
    axis.spines[:].set_visible(False)
    return image
