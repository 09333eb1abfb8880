"""Figures: the styles of schemes, and names beside points."""

from __future__ import annotations

import io
import itertools
import math

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import Normalize
from matplotlib.text import Text

from metis_hf import scheme_names
from metis_hf.lab.show import figure as figure_module
from metis_hf.lab.show.figure import (
    STYLES,
    Line,
    Point,
    draw_lines,
    figure_axes,
    heat_map,
    name_points,
    scatter_figure,
    scheme_styles,
    shared_legend,
    smooth,
)


class TestStyles:
    def test_every_scheme_has_its_own(self):
        assert set(STYLES) == set(scheme_names())
        looks = {(style.color, style.line) for style in STYLES.values()}
        assert len(looks) == len(STYLES)  # curves have no markers
        assert STYLES["bf16"].color == "black"

    def test_a_scheme_looks_the_same_in_every_figure(self):
        for names in (["metis"], ["bf16", "mine", "nvfp4", "metis"], ["metis, rank 8", "metis"]):
            styles = scheme_styles(names)
            assert styles["metis"] == STYLES["metis"]
            assert len(set(styles.values())) == len(styles)

    def test_no_other_name_has_the_color_of_a_scheme(self):
        """A reader would take it for the scheme, which may be in the next figure."""
        styles = scheme_styles([f"variant {n}" for n in range(35)])
        own = {style.color for style in STYLES.values()}
        others = [style for name, style in styles.items() if name != "bf16"]
        assert not own & {style.color for style in others}
        assert len(set(others)) == 35

    def test_more_names_than_styles(self):
        names = [f"scheme {n}" for n in range(36)]
        with pytest.raises(ValueError, match="one figure cannot show 36 schemes, because only 35"):
            scheme_styles(names)
        styles = scheme_styles(names, repeat=True)
        assert styles["scheme 35"] == styles["scheme 0"] != styles["scheme 1"]


def test_moving_averages():
    assert smooth([1.0, 2.0, 6.0, 7.0], 3) == [1.5, 3.0, 5.0, 6.5]  # shorter at the ends
    assert smooth([1.0, 5.0], 1) == [1.0, 5.0]


def test_names_stay_within_the_edges_and_cover_no_other():
    """Thirteen named points of nearly one place at the left of a plot, as drawn."""
    figure, ((axis,),) = figure_axes(1, 1, (9.5, 6.0))
    points = [(0.2 * (i % 3), 1.0 + 0.03 * i, f"a scheme with a name {i}") for i in range(13)]
    axis.plot([0.0, 60.0], [0.0, 5.0])
    figure.draw_without_rendering()
    name_points(axis, points)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axis.texts]  # without the lines
    edge = axis.get_window_extent()
    assert len(boxes) == 13
    assert min(box.x0 for box in boxes) >= edge.x0
    assert min(box.y0 for box in boxes) >= edge.y0
    assert max(box.x1 for box in boxes) <= edge.x1
    assert max(box.y1 for box in boxes) <= edge.y1
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)


def test_one_far_point_leaves_room_for_the_others():
    """Beyond 1 the scale is logarithmic, which moves the other points apart."""
    style = STYLES["metis"]

    def rows_of_ink(far: float) -> int:
        heights = (0.1, 0.3, 0.5, 0.7, far)
        points = [Point(float(n), y, "", style) for n, y in enumerate(heights)]
        picture = matplotlib.image.imread(io.BytesIO(scatter_figure(points, "x", "y")))
        blue = (picture[..., 2] > 0.6) & (picture[..., 0] < 0.2)
        left = blue[:, : int(0.75 * blue.shape[1])]  # without the far point
        return int(np.ptp(np.nonzero(left.any(axis=1))[0]))

    assert rows_of_ink(50.0) > 0.2 * rows_of_ink(0.9)


def test_what_is_written_can_be_read_and_is_inside(monkeypatch):
    """At least 12 pixels where a page shows the figure 840 pixels wide."""
    kept = []
    monkeypatch.setattr(figure_module, "as_png", kept.append)
    points = [Point(9.0 * n, 0.1 * n, f"a scheme with a long name {n}", STYLES["metis"])
              for n in range(4)]  # fmt: skip
    scatter_figure(points, "x", "y", title="a model")
    (figure,) = kept
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert {"a model", "x", "y", points[-1].name} <= {text.get_text() for text in texts}
    shrunk = 840 / figure.bbox.width
    assert min(text.get_size() / 72 * figure.dpi for text in texts) * shrunk >= 12
    frame = figure.axes[0].get_window_extent()
    names = [Text.get_window_extent(text) for text in figure.axes[0].texts]
    assert len(names) == len(points)
    assert max(box.x1 for box in names) <= frame.x1


def test_curves_have_one_legend():
    figure, axes = figure_axes(2, 1, (6, 7))
    lines = [
        Line("_hidden $x$", [1, 2], [1.0, 2.0], STYLES["metis"], ([0.9, 1.9], [1.1, 2.1])),
        Line("close", [1, 2], [1.5, 2.01], STYLES["nvfp4"], points=True),
        Line("diverged", [1, 2], [1.5, math.nan], STYLES["nvidia"]),
    ]
    for axis in axes.flat:
        draw_lines(axis, lines)
    shared_legend(figure, axes.flat)
    figure.draw_without_rendering()
    shown = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert shown == [r"_hidden \$x\$", "close", "diverged"]


def test_a_heat_map_marks_nan_and_writes_numbers():
    figure, ((axis,),) = figure_axes(1, 1, (3, 2))
    values = np.array([[0.0, 1.0], [math.nan, 0.5]])
    image = heat_map(axis, values, Normalize(0, 1), crosses=np.isnan(values), text=".0%")
    figure.draw_without_rendering()
    assert [(t.get_text(), t.get_color()) for t in axis.texts][:2] == [
        ("0%", "white"),
        ("100%", "black"),
    ]
    (cross,) = axis.collections
    assert cross.get_offsets().tolist() == [[0.0, 1.0]]
    assert np.ma.getmaskarray(image.get_array()).tolist() == [[False, False], [True, False]]
