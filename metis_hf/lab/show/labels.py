"""Names beside the points of a scatter plot, where they cover nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

_FONT = 8  # points
MARKER = 7  # points; of the points that are named
# Where a name may stand: distances from its point, in points, nearest first.
_DISTANCES = (9, 16, 26, 38, 52, 70, 92, 118)
_DIRECTIONS = (
    *((1, 0), (1, 0.7), (1, -0.7), (-1, 0), (0, 1), (0, -1), (-1, 0.7), (-1, -0.7)),
    *((1, 1.5), (1, -1.5)),
)

Box = tuple[float, float, float, float]  # left, bottom, right, top in points


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
