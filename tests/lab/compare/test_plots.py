"""Small pieces of the plots that can be wrong without looking wrong."""

import warnings

import pytest

from metis_hf import scheme_names
from metis_hf.lab.compare.loss_figures import curves, paired_gaps, plot_curves
from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.show.figure import scheme_styles, smooth, spread
from metis_hf.schemes import CONTROL


def test_no_two_schemes_look_alike():
    styles = scheme_styles(scheme_names(), "bf16")
    assert set(styles) == set(scheme_names())
    assert len(set(styles.values())) == len(styles)
    assert styles[CONTROL].color == "black"
    looks = {(style.color, style.line) for style in styles.values()}
    assert len(looks) == len(styles)  # curves have no markers
    with pytest.raises(ValueError, match="36 schemes in one picture"):
        scheme_styles([f"scheme{i}" for i in range(36)], "bf16")


def test_smooth_is_a_centred_mean_shorter_at_the_ends():
    assert smooth([1.0, 2.0, 6.0, 7.0], 3) == [1.5, 3.0, 5.0, 6.5]
    assert smooth([1.0, 5.0], 1) == [1.0, 5.0]


def test_spread_keeps_order_and_distance():
    moved = spread([2.0, 1.95, 5.0], 0.5)
    assert moved == [2.45, 1.95, 5.0]
    assert spread([], 1.0) == []


def test_losses_are_compared_step_by_step():
    """The control's result is of a version that did not log measured steps, such as the first."""

    def result(scheme, seed, losses):
        history = [{"step": step, "loss": loss} for step, loss in losses.items()]
        return SchemeResult(scheme, {}, "", 1.0, {}, 0.1, history, seed=seed)

    results = [
        result("bf16", 0, {10: 2.0, 20: 1.0}),
        result("metis", 0, {1: 8.0, 10: 2.2, 20: 1.1}),
        result("bf16", 1, {10: 2.0, 20: 1.0}),
        result("metis", 1, {10: 2.0, 20: 1.0}),
    ]
    steps, gaps = paired_gaps(results, "metis", 1)
    assert steps == [10, 20]
    assert gaps == [pytest.approx([10, 10]), [0, 0]]
    assert curves(results)["metis"] == ([10, 20], [[2.2, 1.1], [2.0, 1.0]])
    assert paired_gaps(results[1:2], "metis", 1) == ([], [])


def test_a_curve_of_one_step_is_drawn_without_a_warning(tmp_path):
    history = [{"step": 4, "loss": 2.0}]
    results = [SchemeResult("bf16", {}, "", 2.0, {}, 0.1, history)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curves(results, tmp_path / "loss.png", "title")
