"""Pages of `metis-hf report`, of real runs, in a real browser."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace

import pytest
import transformers
import typer
from typer.testing import CliRunner

from lab.show import browser
from metis_hf.cli import report
from metis_hf.lab import health_maps
from metis_hf.lab.health_maps import PANELS, grid, heat_map_of
from metis_hf.lab.health_page import findings, write_report
from metis_hf.lab.run_records import read_run
from metis_hf.training.health import TENSORS
from metis_hf.training.reference_values import SQNR_NEAREST, SQNR_STOCHASTIC
from metis_hf.training.run_record import HEALTH_FILE

MEASURED = [1, 3, 6, 9, 12]
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory):
    return write_report([trained[0]], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def broken(train, tmp_path_factory):
    """A run with NaN from its first step on."""
    folder = tmp_path_factory.mktemp("nan")
    train(folder, broken=True, schedule=False, max_steps=3, save_steps=3)
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Figures in place of their pictures."""
    monkeypatch.setattr(health_maps, "as_png", lambda figure: figure)


class TestPage:
    @pytest.mark.slow
    def test_browser_shows_every_picture_and_fetches_nothing(self, page, tmp_path):
        view = browser.open_page(page, tmp_path, browser.IMAGES)
        assert view.console == []
        widths = [int(width) for width in view.result("images").split()]
        assert len(PANELS) - 2 <= len(widths) <= len(PANELS)  # shares may be zero throughout
        assert min(widths) > 300
        assert view.result("fetched") == "0"
        assert not re.findall(r"https?://", page.read_text())

    def test_says_what_the_run_did(self, page, trained):
        losses = [e["loss"] for e in trained[1].state.log_history if "loss" in e]
        text = html.unescape(page.read_text())
        for said in (
            "12 of 12 steps",
            f"The last logged loss is {losses[-1]:.4g} at step 12; the lowest is {min(losses):.4g}",
            "All logged losses and all measured tensors are finite.",
            "never falls below √3 times its quantization noise",
            "At step 12, the last measurement, the SQNR is lowest in model.layers.",
            "refreshed 3 times, most recently at step 12, when 14 weights were decomposed again",
            "switched to scheme metis, high precision in the forward pass, at step 11.",
            f"{trained[1].model.metis_report.flops_share:.1%}",
            "refresh_interval",
            transformers.__version__,
        ):
            assert said in text

    def test_every_caption_names_good_and_bad(self, page):
        captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.read_text(), re.DOTALL)
        assert captions
        for caption in captions:
            assert re.search(r"\bGood\b.*\b[Bb]ad\b", caption, re.DOTALL), caption

    def test_a_run_whose_noise_takes_over(self, copy):
        lines = [json.loads(line) for line in (copy / HEALTH_FILE).read_text().splitlines()]
        for line in lines:
            for norms in line.get("noise", {}).values():
                norms[1] *= 1 if line["step"] < 6 else 100
        (copy / HEALTH_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
        said = " ".join(findings(read_run(copy)))
        assert "falls below √3 times its quantization noise at step 6 and stays there" in said

    def test_nan_is_named_with_its_likely_origin(self, broken, undrawn):
        said = " ".join(findings(read_run(broken)))
        assert "no logged loss is finite" in said
        assert "NaN or infinity at 3 of the logged and measured steps, first at step 1" in said
        assert "loss is nan, grad_norm is nan, model.layers.1.mlp.down_proj (activation)" in said


class TestHeatMaps:
    def test_every_statistic_has_one(self, trained):
        """But the share that is not finite: where it is, the others have a cross."""
        layers = next(iter(read_run(trained[0]).layers.values()))
        measured = {stat for layer in layers.values() for stats in layer.values() for stat in stats}
        assert {panel.stat for panel in PANELS} - {"noise_ratio"} == measured - {"nonfinite"}

    def test_hold_the_file_by_kind_in_model_order(self, trained, undrawn):
        run = read_run(trained[0])
        layers = sorted(run.layers[1], key=lambda name: KINDS.index(name.split(".")[-1]))
        (panel,) = (panel for panel in PANELS if panel.stat == "orthogonality")
        axis, bar = heat_map_of(run, panel).axes
        names = [label.get_text() for label in axis.get_yticklabels()]
        assert names == [f"{kind} {block}" for kind in KINDS for block in (0, 1)]
        assert [label.get_text() for label in axis.get_xticklabels()] == list(map(str, MEASURED))
        assert axis.images[0].get_array().tolist() == [
            [run.layers[step][layer]["weight"]["orthogonality"] for step in MEASURED]
            for layer in layers
        ]
        low, high = bar.get_ylim()
        for value, _ in panel.marks:  # also where every measured value lies to one side of them
            assert low - 1e-9 <= value <= high + 1e-9
            assert any(set(line.get_ydata()) == {value} for line in bar.lines)

    def test_gradient_against_noise(self, trained):
        run = read_run(trained[0])
        values, bad = grid(run, "gradient of the weight", "noise_ratio")
        gradient, noise = run.noise[MEASURED[-1]]["model.layers.0.self_attn.q_proj"]
        assert values[0, -1] == pytest.approx(gradient / (3**0.5 * noise))
        assert not bad.any()

    def test_tensors_share_a_scale_around_plain_data(self, trained, undrawn):
        (panel,) = (panel for panel in PANELS if panel.stat == "sqnr_db")
        *maps, _bar = heat_map_of(read_run(trained[0]), panel).axes
        assert [axis.get_title() for axis in maps] == list(TENSORS)
        assert len({axis.images[0].norm for axis in maps}) == 1
        norm = maps[0].images[0].norm
        assert norm(SQNR_NEAREST) == pytest.approx(0.5)  # the middle of the colors
        assert 0 <= norm(SQNR_STOCHASTIC) < 0.5

    def test_a_share_that_is_zero_throughout_has_no_map(self, trained, undrawn):
        run = read_run(trained[0])
        (panel,) = (panel for panel in PANELS if panel.stat == "zeroed")
        for layers in run.layers.values():
            for tensors in layers.values():
                tensors["weight"]["zeroed"] = 0.0
        *maps, _bar = heat_map_of(run, panel).axes
        assert [axis.get_title() for axis in maps] == [t for t in TENSORS if t != "weight"]

    def test_a_figure_names_its_run(self, trained, undrawn):
        run = read_run(trained[0])
        title = heat_map_of(run, PANELS[0]).get_suptitle()
        assert title.startswith("metis, LlamaForCausalLM\nStable rank")

    def test_a_tensor_that_is_never_finite_has_crosses(self, trained, undrawn):
        run = read_run(trained[0])
        broken = {
            step: {name: {**of, "gradient": {"nonfinite": 1.0}} for name, of in layers.items()}
            for step, layers in run.layers.items()
        }
        (panel,) = (panel for panel in PANELS if panel.stat == "sqnr_db")
        figure = heat_map_of(replace(run, layers=broken), panel)
        maps = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
        assert [axis.get_title() for axis in maps] == list(TENSORS)
        crosses = [sum(len(each.get_offsets()) for each in axis.collections) for axis in maps]
        assert crosses == [0, 0, len(MEASURED) * len(run.layers[1])]

    def test_rows_are_told_apart(self, trained, undrawn):
        run = read_run(trained[0])
        stats = next(iter(run.layers[1].values()))
        names = {
            "encoder.block.0.q": "encoder q 0",
            "decoder.block.0.q": "decoder q 0",
            "shared.q": "q",
            "a.3.experts.metis_down_proj.7": "metis_down_proj 3.7",
        }
        run = replace(run, layers={1: dict.fromkeys(names, stats)}, noise={})
        axis = heat_map_of(run, PANELS[0]).axes[0]
        assert [label.get_text() for label in axis.get_yticklabels()] == list(names.values())


class TestCommand:
    @pytest.fixture
    def app(self):
        made = typer.Typer()
        made.callback()(lambda: None)
        made.command()(report.report)
        return made

    def test_one_run(self, app, copy, undrawn, monkeypatch):
        monkeypatch.setattr(health_maps, "as_png", lambda figure: b"")
        done = CliRunner().invoke(app, ["report", str(copy)])
        assert done.exit_code == 0, done.output
        assert done.output.strip() == str(copy / "report.html")
        assert "Training run: metis" in (copy / "report.html").read_text()

    def test_several_runs_make_a_table(self, app, trained, broken, tmp_path):
        """One without a record is left out, one that is named twice counts once."""
        out, empty, missing = tmp_path / "new/all.html", tmp_path / "empty", tmp_path / "missing"
        empty.mkdir()
        runs = [empty, trained[0], broken, trained[0], missing]
        done = CliRunner().invoke(app, ["report", *map(str, runs), "--out", str(out)])
        assert done.exit_code == 0, done.output
        text = html.unescape(out.read_text())
        assert f"{empty} was left out: {empty} has no record of a run; looked for" in text
        assert f"{missing} was left out: {missing} is not a directory" in text
        view = browser.open_page(out, tmp_path, browser.sort_by("steps not finite"))
        assert view.console == []
        assert view.result("down") == "3|0"
        # Two runs of a scheme have two names.
        assert f"metis ({broken.parent.name}/{broken.name})" in text

    def test_bf16_has_no_quantizer(self, train, tmp_path):
        train(tmp_path, "bf16", schedule=False, max_steps=1)
        run = read_run(tmp_path)
        assert run.fp4_share == 0
        assert "nothing is quantized" in " ".join(findings(run))

    def test_errors(self, copy, tmp_path):
        with pytest.raises(
            ValueError, match="is a directory; give a file name for the page, for example "
        ):
            write_report([copy], tmp_path)
        with pytest.raises(FileNotFoundError, match="none of the runs has a record"):
            write_report([tmp_path, tmp_path / "missing"])
        with pytest.raises(ValueError, match="no run to report on"):
            write_report([])
