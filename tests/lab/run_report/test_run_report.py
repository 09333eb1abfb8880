"""Pages of `metis-hf report`, of real runs, in a real browser."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import transformers
import typer
from typer.testing import CliRunner

from lab.run_report.runs import MEASURED, REFRESHED, train
from lab.show import browser
from lab.show.test_html import IMAGES, sort_by
from metis_hf import metis_layers, scheme_names
from metis_hf.cli import report
from metis_hf.lab.run_report import figures, heatmaps
from metis_hf.lab.run_report import page as report_page
from metis_hf.lab.run_report.heatmaps import PANELS, grid, order_layers, short_names
from metis_hf.lab.run_report.page import run_page, write_report
from metis_hf.lab.run_report.read import read_run
from metis_hf.lab.run_report.run import events
from metis_hf.training.health import TENSORS
from metis_hf.training.run_record import HEALTH_FILE

# A screenshot of text alone on a white ground; pictures with colour scales have thousands.
COLORS_OF_TEXT = 400


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory):
    return write_report([trained[0]], tmp_path_factory.mktemp("page") / "report.html")


def in_browser(page, folder, script):
    view = browser.open_page(page, folder, script)
    assert view.console == []
    return view


class TestPage:
    @pytest.mark.slow
    def test_browser_shows_every_picture(self, page, tmp_path):
        view = in_browser(page, tmp_path, IMAGES)
        widths = [int(width) for width in view.result("images").split()]
        # Loss, noise, refreshes, and a heat map for each statistic; shares may be zero throughout.
        assert 3 + len(PANELS) - 2 <= len(widths) <= 3 + len(PANELS)
        assert min(widths) > 300
        assert view.result("fetched") == "0"
        assert not re.findall(r"https?://", page.read_text())

    @pytest.mark.slow
    def test_screenshot_has_colour(self, page, tmp_path):
        picture = browser.screenshot(page, tmp_path, tmp_path / "page.png", (1400, 2600))
        pixels = (255 * matplotlib.image.imread(picture)[..., :3]).astype(np.uint8)
        assert pixels.shape[:2] == (2600, 1400)
        upper, lower = pixels[:1300], pixels[1300:]
        for part in (upper, lower):
            assert len(np.unique(part.reshape(-1, 3), axis=0)) > COLORS_OF_TEXT

    def test_layers_are_sorted_by_risk_and_by_click(self, page, trained, tmp_path):
        view = in_browser(page, tmp_path, sort_by("worst SQNR"))
        before, up, down = (
            [float(v) for v in html.unescape(view.result(name)).split("|")]
            for name in ("before", "up", "down")
        )
        assert before == up == sorted(up)
        assert down == sorted(down, reverse=True)
        assert len(up) == len(list(metis_layers(trained[1].model)))
        assert up[0] < up[-1]

    def test_says_what_the_run_logged(self, page, trained):
        history = [e for e in trained[1].state.log_history if "loss" in e]
        text = html.unescape(page.read_text())
        assert f"{history[-1]['loss']:.4g}" in text
        assert f"{min(e['loss'] for e in history):.4g}" in text
        assert "12 of 12 steps" in text
        assert "scheme metis, high precision in the forward pass" in text
        assert text.count("14 weights decomposed again") == len(REFRESHED)
        assert "refresh_interval" in text
        assert transformers.__version__ in text
        share = trained[1].model.metis_report.flops_share
        assert f"{share:.1%}" in text

    def test_a_run_whose_noise_takes_over(self, copy, no_heatmaps):
        """The page names the step where the recorded norms cross."""
        lines = [json.loads(line) for line in (copy / HEALTH_FILE).read_text().splitlines()]
        for line in lines:
            for norms in line.get("noise", {}).values():
                norms[1] *= 1 if line["step"] < 6 else 100
        (copy / HEALTH_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert "falls below 1 at step 6 and stays there" in run_page(read_run(copy)).render()

    def test_bf16_has_no_noise_and_no_quantizer(self, tmp_path, no_heatmaps):
        train(tmp_path, "bf16", schedule=False, max_steps=3)
        run = read_run(tmp_path)
        assert run.fp4_share == 0
        text = run_page(run).render()
        assert "nothing is quantized" in text
        assert "no quantized GEMM" in text


class TestNotFinite:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("nan")
        train(folder, broken=True, schedule=False, max_steps=3, save_steps=3)
        return read_run(folder)

    def test_is_shown_and_named(self, run, tmp_path):
        found = [(step, text) for step, what, text in events(run) if what == "not finite"]
        assert (1, "loss is nan") in found
        assert any(step == 1 and "down_proj (activation)" in text for step, text in found)
        page = tmp_path / "report.html"
        run_page(run).save(page)
        view = in_browser(page, tmp_path, IMAGES)
        assert "0" not in view.result("images").split()
        text = html.unescape(page.read_text())
        assert "no finite loss" in text
        assert "The loss was not finite at 3 steps, first at step 1" in text
        assert ">nan<" in text

    def test_is_marked_in_the_heat_map(self, run):
        values, bad = grid(run, "activation", "sqnr_db")
        layers = order_layers(list(run.layers[1]))
        row = layers.index("model.layers.1.mlp.down_proj")
        assert bad[row].all()
        assert np.isnan(values[row]).all()
        fine = layers.index("model.layers.0.mlp.down_proj")
        assert math.isfinite(values[fine, 0])
        assert not bad[fine, 0]


def test_a_tensor_that_is_never_finite_has_its_crosses(trained, monkeypatch):
    """In pictures of what the others have; orthogonality is of weights alone."""
    monkeypatch.setattr(heatmaps, "as_png", lambda figure: figure)
    run = read_run(trained[0])
    broken = {
        step: {name: {**tensors, "gradient": {"nonfinite": 1.0}} for name, tensors in of.items()}
        for step, of in run.layers.items()
    }
    panels = {panel.stat: panel for panel in PANELS}
    for stat, expected in (("sqnr_db", TENSORS), ("orthogonality", ("weight",))):
        figure = heatmaps.heatmap(replace(run, layers=broken), panels[stat])
        maps = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
        assert [axis.get_title() for axis in maps] == list(expected)
        crosses = [sum(len(each.get_offsets()) for each in axis.collections) for axis in maps]
        assert crosses == [0, 0, len(MEASURED) * len(run.layers[1])][: len(maps)]


def test_rows_are_grouped_by_kind_in_model_order(trained):
    layers = list(read_run(trained[0]).layers[1])
    names = short_names(order_layers(layers))
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert names == [f"{kind} {block}" for kind in kinds for block in (0, 1)]
    assert short_names(["a.3.experts.metis_down_proj.7"]) == ["metis_down_proj 3.7"]
    both = ["encoder.block.0.SelfAttention.q", "decoder.block.0.SelfAttention.q", "shared.q"]
    assert short_names(both) == ["encoder q 0", "decoder q 0", "q"]


def test_every_statistic_has_a_heat_map(trained):
    """But the share that is not finite: where it is, the others have a cross."""
    layers = next(iter(read_run(trained[0]).layers.values()))
    measured = {stat for layer in layers.values() for stats in layer.values() for stat in stats}
    assert {panel.stat for panel in PANELS} == measured - {"nonfinite"}


def test_heat_map_holds_the_file(trained):
    run = read_run(trained[0])
    values, bad = grid(run, "weight", "orthogonality")
    layers = order_layers(list(run.layers[1]))
    assert not bad.any()
    expected = [
        [run.layers[step][layer]["weight"]["orthogonality"] for step in MEASURED]
        for layer in layers
    ]
    assert values.tolist() == expected


@pytest.mark.parametrize("count", [5, 22])
def test_no_two_runs_look_alike(trained, count, monkeypatch):
    monkeypatch.setattr(figures, "as_png", lambda figure: figure)
    names = scheme_names()[:count]
    one = read_run(trained[0])
    figure = figures.overlay([replace(one, name=name) for name in names])
    for axis in figure.axes:
        # Lines without a name have one of matplotlib's, which begins with an underscore.
        curves = {line.get_label(): line for line in axis.lines if line.get_label()[0] != "_"}
        assert [label.split(",")[0] for label in curves] == names
        looks = {(line.get_color(), line.get_linestyle()) for line in curves.values()}
        assert len(looks) == count
        assert curves[next(iter(curves))].get_color() == "black"  # bf16, the control
    legends = figure.legends if count == 22 else [figure.axes[0].get_legend()]
    assert [len(legend.get_texts()) for legend in legends] == [count]


class TestCommand:
    @pytest.fixture
    def app(self):
        made = typer.Typer()
        made.callback()(lambda: None)
        made.command()(report.report)
        return made

    def test_one_run(self, app, copy, no_heatmaps):
        done = CliRunner().invoke(app, ["report", str(copy)])
        assert done.exit_code == 0, done.output
        assert done.output.strip() == str(copy / "report.html")
        assert (copy / "report.html").exists()

    @pytest.mark.slow
    def test_several_runs(self, app, trained, tmp_path):
        train(tmp_path / "bf16", "bf16", schedule=False, max_steps=6)
        out = tmp_path / "new" / "both.html"
        done = CliRunner().invoke(
            app, ["report", str(trained[0]), str(tmp_path / "bf16"), "--out", str(out)]
        )
        assert done.exit_code == 0, done.output
        view = in_browser(out, tmp_path, sort_by("run"))
        assert view.result("up") == "bf16|metis"

    def test_a_run_without_record_is_left_out(self, app, copy, tmp_path):
        """The others are compared, and the page names it; refused only if none is left."""
        empty, missing = tmp_path / "empty", tmp_path / "missing"
        empty.mkdir()
        out = tmp_path / "page.html"
        arguments = ["report", str(empty), str(copy), str(missing), "--out", str(out)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        text = html.unescape(out.read_text())
        assert f"{empty} was left out: {empty} has no record of a run; looked for" in text
        assert f"{missing} was left out: {missing} is no directory" in text
        assert ">metis<" in text
        with pytest.raises(FileNotFoundError, match="none of the runs has a record"):
            write_report([empty, missing])
        assert write_report([empty, copy]) == copy / "report.html"

    def test_a_run_that_is_named_twice_is_one(self, copy, tmp_path, no_heatmaps, monkeypatch):
        monkeypatch.chdir(copy)
        text = write_report([copy, Path()], tmp_path / "x.html").read_text()
        assert "Training run: metis" in text

    def test_two_runs_of_a_scheme_have_two_names(self, trained, copy, tmp_path):
        text = write_report([trained[0], copy], tmp_path / "x.html").read_text()
        assert f"metis ({trained[0]})" in text
        assert f"metis ({copy})" in text


class TestScale:
    """Every figure of health says what is good and what is bad."""

    def test_every_caption_names_both(self, page):
        captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.read_text(), re.DOTALL)
        assert len(captions) >= 8
        for caption in captions:
            assert re.search(r"\bGood\b.*\b[Bb]ad\b", caption, re.DOTALL), caption

    def test_references_are_on_the_scale_of_colours(self, trained, monkeypatch):
        """Also where every measured value lies to one side of them."""
        for module in (figures, heatmaps):
            monkeypatch.setattr(module, "as_png", lambda figure: figure)
        run = read_run(trained[0])
        panels = {panel.stat: panel for panel in PANELS}
        for stat in ("sqnr_db", "orthogonality", "narrowing", "energy"):
            figure = heatmaps.heatmap(run, panels[stat])
            bars = [axis for axis in figure.axes if axis.get_label() == "<colorbar>"]
            assert bars
            for bar in bars:
                low, high = bar.get_ylim()
                for value, _ in panels[stat].marks:
                    assert low - 1e-9 <= value <= high + 1e-9
                    assert any(set(line.get_ydata()) == {value} for line in bar.lines)

    def test_cells_are_shaded_on_one_scale(self, trained):
        """None from 20.4 dB up, all of it from 10 dB down, whatever the other layers have."""
        run = read_run(trained[0])
        last = run.layers[max(run.layers)]
        for value, name in zip((25.0, 20.4, 15.2, 9.0), last):
            last[name]["weight"]["sqnr_db"] = value
        rows = dict((row[0].text, row) for _, row in report_page._layer_rows(run, max(run.layers)))
        shades = [rows[name][1].shade for name in list(last)[:4]]
        assert shades == [0, 0, pytest.approx(0.5), 1]
