"""Names beside points of a plot."""

import itertools

import pytest
from matplotlib.text import Text

from metis_hf.lab.show.figure import figure_axes, name_points


@pytest.fixture
def names():
    """Thirteen points of nearly one place at the left of a plot, named, as drawn: pixel boxes."""
    figure, axes = figure_axes(1, 1, (9.5, 6.0))
    axis = axes[0][0]
    points = [(0.2 * (i % 3), 1.0 + 0.03 * i, f"a scheme with a name {i}") for i in range(13)]
    axis.plot([0.0, 60.0], [0.0, 5.0])
    figure.draw_without_rendering()
    name_points(axis, points)
    figure.draw_without_rendering()
    return axis, [Text.get_window_extent(text) for text in axis.texts]  # without the lines


def test_names_stay_within_the_left_and_the_lower_edge(names):
    axis, boxes = names
    edge = axis.get_window_extent()
    assert len(boxes) == 13
    assert min(box.x0 for box in boxes) >= edge.x0
    assert min(box.y0 for box in boxes) >= edge.y0


def test_names_cover_no_other_name(names):
    for a, b in itertools.combinations(names[1], 2):
        assert not a.overlaps(b)
