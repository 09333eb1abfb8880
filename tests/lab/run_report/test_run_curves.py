"""The gaps and the held-out losses of several runs, by hand and on their page."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

import pytest

from metis_hf.lab import run_curves
from metis_hf.lab.health_page import table_page
from metis_hf.lab.run_curves import curves_figure, gaps_to_control
from metis_hf.lab.run_records import RunRecord
from metis_hf.lab.show.figure import STYLES


def run(scheme, losses, held_out=(), seed=0, name=""):
    log = {10 * (n + 1): {"loss": loss} for n, loss in enumerate(losses)}
    for step, loss in zip((10, 20), held_out):
        log[step]["eval_loss"] = loss
    config = {"scheme": scheme, "seed": seed}
    return RunRecord(Path(f"runs/{name or scheme}"), name or scheme, "Llama", config, log=log)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures in place of their pictures."""
    monkeypatch.setattr(run_curves, "as_png", lambda figure, title: (figure, title))


def test_gaps_are_to_the_control_of_the_same_seed():
    controls = [run("bf16", [2.0, 1.0], [3.0, 2.0]), run("bf16", [4.0, 2.0], [5.0, 4.0], seed=1)]
    metis = run("metis", [4.4, 2.1, 9.0], [5.0, 4.2], seed=1)
    found = gaps_to_control(metis, [*controls, metis])
    assert found.steps == [10, 20]
    assert found.training == pytest.approx([10, 5])
    assert found.at_end == pytest.approx(5)
    assert found.held_out == pytest.approx(5)
    assert gaps_to_control(controls[1], controls) is None
    assert gaps_to_control(metis, [metis]) is None
    other = run("metis", [2.2, math.nan], seed=7)
    assert gaps_to_control(other, [*controls, other]).training == pytest.approx(
        [10, math.nan], nan_ok=True
    )


def test_the_figure_has_the_gap_and_held_out_losses(undrawn):
    runs = [run("bf16", [2.0, 1.0], [3.0, 2.0]), run("metis", [2.2, 1.1], [3.1, 2.1])]
    figure, title = curves_figure(runs)
    above, held_out = figure.axes
    assert above.get_ylabel() == "training loss above bf16 (%)"
    assert held_out.get_ylabel() == "held-out loss (nats per token)"
    gap, _zero = above.lines
    assert gap.get_ydata() == pytest.approx([10, 10])
    assert gap.get_color() == STYLES["metis"].color
    assert [line.get_label() for line in held_out.lines] == ["bf16", "metis"]
    assert held_out.lines[1].get_ydata().tolist() == [3.1, 2.1]
    assert title == "Llama"


def test_a_panel_without_numbers_is_left_out(undrawn):
    alone = [run("metis", [2.2, 1.1], [3.1, 2.1]), run("nvidia", [2.2, 1.1])]
    figure, _ = curves_figure(alone)
    assert [axis.get_ylabel() for axis in figure.axes] == ["held-out loss (nats per token)"]
    assert curves_figure([run("metis", [2.2]), run("nvidia", [2.2])]) is None


def test_many_runs_show_six_and_name_the_others(undrawn):
    """A run that hardly began tells least."""
    runs = [run("bf16", [2.0] * 9), *(run("metis", [2.1 + n] * 9, name=f"m{n}") for n in range(7))]
    figure, _ = curves_figure([*runs, run("nvidia", [9.0])])
    shown = [line.get_label() for line in figure.axes[0].lines][:-1]
    assert shown == ["m0", "m2", "m3", "m4", "m6"]
    assert "only in the table: m1, m5, nvidia" in figure.axes[0].get_xlabel()


def test_the_table_says_which_loss_a_gap_is_of():
    runs = [run("bf16", [2.0, 1.0], [3.0, 2.0]), run("metis", [2.2, 1.05], [3.1, 2.2])]
    text = html.unescape(re.sub(r"<[^>]*>", " ", table_page(runs, []).render()))
    text = " ".join(text.split())
    for title in (
        "last held-out loss held-out loss above bf16 (%)",
        "last training loss training loss above bf16 (%)",
        "metis 2.2000 +10.00 1.0500 +5.00",
        "bf16 2.0000 n/a 1.0000 n/a",
    ):
        assert title in text


def test_one_note_of_several_runs_is_shown_once():
    runs = [run("bf16", [2.0]), run("metis", [2.0])]
    for each in runs:
        each.notes.append("No spectral health.")
    text = table_page(runs, []).render()
    assert text.count("No spectral health.") == 1
    assert "bf16, metis: No spectral health." in text
