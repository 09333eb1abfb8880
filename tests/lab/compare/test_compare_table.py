"""What a comparison makes of its runs: statistics over seeds, tables, sentences, figures."""

from __future__ import annotations

import dataclasses
import io
import math
import warnings

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from metis_hf import MetisConfig
from metis_hf.lab.compare import loss_table, outputs
from metis_hf.lab.compare.loss_figures import curves, paired_gaps, plot_curves
from metis_hf.lab.compare.results import SchemeResult
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.compare.statistics import summarize, t_interval
from metis_hf.lab.show.figure import scheme_styles


def result(scheme, seed, loss, tasks=None, curve=(), seconds=0.1, dense=None):
    history = [{"step": i + 1, "loss": value} for i, value in enumerate(curve)]
    values = {
        task: {"metric": "acc", "value": v, "stderr": 0.1} for task, v in (tasks or {}).items()
    }
    return SchemeResult(
        scheme, {}, "", loss, values, seconds, history,
        seed=seed, peak_memory=10**6, parameters=5, loss_dense=dense,
    )  # fmt: skip


class TestTerminal:
    def shown(self, width, seeds=3):
        """Return the lines of the table and the columns that are left out."""
        losses = {"bf16": 3.7, "metis-paper": 4.4, "metis": 3.8, "half of the blocks in BF16": 4.0}
        runs = [
            result(name, seed, loss * (1 + 0.01 * seed**2 * loss), {"piqa": 0.5}, dense=loss)
            for seed in range(seeds)
            for name, loss in losses.items()
        ]
        summaries = summarize(runs, "metis", extra=dict.fromkeys(losses, 64.2))
        table, left_out = loss_table.terminal(summaries, "metis", timed=True, width=width)
        console = Console(file=io.StringIO(), width=width)
        console.print(table)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        return lines, left_out

    @pytest.mark.parametrize("seeds", [1, 3])
    def test_80_columns_hold_whole_numbers(self, seeds):
        lines, left_out = self.shown(80, seeds)
        rows = [line for line in lines if line.startswith("│")]
        assert len(rows) == 4
        assert all("64.2" in row for row in rows)
        assert all((row.count("±") >= 2) == (seeds > 1) for row in rows[1:])
        assert "MB" in left_out
        assert "Gap to control, %" not in left_out

    def test_a_wide_terminal_holds_all(self):
        lines, left_out = self.shown(200)
        assert left_out == []
        assert "piqa" in " ".join(lines)


class TestInterval:
    @given(st.lists(st.floats(-5, 5), min_size=2, max_size=8, unique=True))
    def test_is_that_of_a_t_test(self, values):
        ours = t_interval(values)
        theirs = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert ours.mean - ours.half_width == pytest.approx(theirs.low, rel=1e-6, abs=1e-9)
        assert ours.mean + ours.half_width == pytest.approx(theirs.high, rel=1e-6, abs=1e-9)

    def test_what_is_not_known(self):
        """One value has no width; what is not finite is not averaged."""
        found = t_interval([2.0])
        assert found.mean == 2.0
        assert math.isnan(found.half_width)
        assert not found.excludes_zero
        assert math.isnan(t_interval([1.0, math.nan]).mean)
        assert math.isnan(t_interval([1.0, math.inf]).mean)


class TestSummaries:
    def test_gap_is_paired_by_seed(self):
        """Seeds differ by more than the schemes do; the paired difference does not see that."""
        results = [
            *(result("bf16", s, loss) for s, loss in ((0, 2.0), (1, 3.0), (2, 4.0))),
            *(result("x", s, 1.01 * loss) for s, loss in ((2, 4.0), (0, 2.0), (1, 3.0))),
        ]
        control, x = summarize(results)
        assert control.gap is None
        assert x.gap.mean == pytest.approx(1.0)
        assert x.gap.half_width < 1e-9
        assert x.deviation == pytest.approx(1.01)

    def test_gap_uses_the_seeds_that_both_have(self):
        results = [result("bf16", 0, 2.0), result("x", 0, 2.2), result("x", 1, 9.0)]
        _, x = summarize(results)
        assert x.gap.count == 1
        assert x.gap.mean == pytest.approx(10.0)
        summaries = summarize([*results[:1], *results[2:]])
        assert summaries[1].gap is None
        assert loss_table.rows(summaries)[1][2] == ""
        found = loss_table.findings(summaries)
        assert found == ["Variants have different seeds; gaps use those they share."]

    def test_the_gap_without_quantizers_is_to_the_controls_loss(self):
        runs = [("bf16", 2.0, 2.0), ("x", 2.2, 2.1), ("old", 2.4, None)]
        summaries = summarize([result(*run[:1], 0, run[1], dense=run[2]) for run in runs])
        assert summaries[0].gap_dense is None
        assert summaries[1].gap_dense.mean == pytest.approx(5.0)
        assert summaries[2].gap_dense is None
        place = loss_table.header(summaries).index("Gap dense, %")
        assert [row[place] for row in loss_table.rows(summaries)] == ["", "+5.00", ""]
        assert "gap_dense_percent" in loss_table.as_csv(summaries).splitlines()[0]
        older = summarize([result("bf16", 0, 2.0), result("x", 0, 2.2)])
        assert "Gap dense, %" not in loss_table.header(older)
        assert all(len(row) == len(loss_table.header(older)) for row in loss_table.rows(older))

    def test_what_is_above_the_reference_is_paired_too(self):
        """Schemes with the same mean gap differ by how surely they are above the reference."""
        name = "mine"
        losses = {"bf16": (2.0, 3.0, 4.0), name: (2.1, 3.2, 4.1), "wild": (2.4, 3.1, 4.2)}
        losses["sure"] = tuple(1.02 * loss for loss in losses[name])
        by_name = {
            s.name: s
            for s in summarize(
                [result(n, i, v) for n, vs in losses.items() for i, v in enumerate(vs)], name
            )
        }
        assert by_name["bf16"].above_reference is None
        assert by_name[name].above_reference is None
        assert by_name["sure"].above_reference.mean == pytest.approx(2.0)
        assert by_name["sure"].above_reference.excludes_zero
        assert not by_name["wild"].above_reference.excludes_zero
        found = loss_table.findings(list(by_name.values()), name)
        assert f"Above {name}, paired by seed: sure." in found
        assert f"Not told apart from {name}, paired by seed: wild." in found
        assert loss_table.header(list(by_name.values()), name)[3] == f"Above {name}, %"
        assert loss_table.rows(list(by_name.values()))[3][3] == "+2.00 ± 0.00"

    def test_a_diverged_seed_is_named_not_averaged_away(self):
        results = [
            *(result("bf16", s, 2.0) for s in (0, 1)),
            result("x", 0, 2.1),
            result("x", 1, math.nan),
        ]
        summaries = summarize(results)
        assert math.isnan(summaries[1].mean)
        assert summaries[1].diverged == (1,)
        assert "nan" in loss_table.rows(summaries)[1][1]
        assert any("x diverged with seed 1" in text for text in loss_table.findings(summaries))
        assert loss_table.best(summaries) == "bf16"


class TestTable:
    @pytest.fixture
    def summaries(self):
        return summarize(
            [
                *(result("bf16", s, 2.0 + s / 10, seconds=0.1) for s in (0, 1, 2)),
                *(result("bf16-split", s, 1.9 + s / 10, seconds=0.2) for s in (0, 1, 2)),
                *(result("a_b", s, 2.1 + s / 10 + 0.2 * (s == 1), seconds=0.3) for s in (0, 1, 2)),
            ]
        )

    def test_cells(self, summaries):
        rows = loss_table.rows(summaries)
        assert rows[0] == ["bf16", "2.1000 ± 0.1000", "", "0.100", "1.00", "1"]
        assert rows[1][2].startswith("-4.77 ± ")
        assert rows[2][4] == "3.00"

    def test_many_variants_are_ordered_by_loss(self, summaries):
        assert loss_table.ordered(summaries) == summaries
        losses = {"bf16": 2.0, "worst": 9.0, "lost": math.nan, "best": 1.0}
        losses |= {f"x{i}": 3.0 + i for i in range(5)}
        names = [
            s.name
            for s in loss_table.ordered(summarize([result(n, 0, v) for n, v in losses.items()]))
        ]
        assert names == ["bf16", "best", "x0", "x1", "x2", "x3", "x4", "worst", "lost"]

    def test_best_is_bold(self, summaries):
        assert "| bf16-split | **2.0000 ± 0.1000** |" in loss_table.markdown(summaries)
        assert "\\textbf{2.0000 $\\pm$ 0.1000}" in loss_table.latex(summaries)
        assert "a\\_b" in loss_table.latex(summaries)

    def test_csv_has_each_seed_in_full(self, summaries):
        lines = loss_table.as_csv(summaries).splitlines()
        assert lines[0].split(",")[3:6] == ["loss_seed_0", "loss_seed_1", "loss_seed_2"]
        assert lines[1].split(",")[4] == "2.1"

    def test_findings_say_what_can_be_told(self, summaries):
        found = loss_table.findings(summaries)
        assert "Below the control, paired by seed: bf16-split." in found
        assert "Not told apart from the control, paired by seed: a_b." in found
        assert any("by itself lowers the loss" in text for text in found)


def test_tasks_are_averaged_over_seeds_and_tasks():
    results = [result("bf16", s, 2.0, {"a": v, "b": 0.5}) for s, v in ((0, 0.2), (1, 0.4))]
    (summary,) = summarize(results)
    assert summary.tasks == pytest.approx({"a": 0.3, "b": 0.5})
    assert summary.average == pytest.approx(0.4)


def test_a_task_that_counts_no_right_answers_is_shown_as_it_is():
    """Bits per byte are no percent, and no part of an average of accuracies."""
    tasks = {"piqa": 0.6, "wikitext": 1.75}
    runs = [result("bf16", seed, 2.0, tasks) for seed in (0, 1)]
    for run in runs:
        run.tasks["wikitext"]["share"] = False
    summaries = summarize(runs)
    assert loss_table.header(summaries)[3:6] == ["piqa", "wikitext", "Avg"]
    assert loss_table.rows(summaries)[0][3:6] == ["60.0", "1.75", "60.0"]
    runs = [dataclasses.replace(run, tasks={"wikitext": run.tasks["wikitext"]}) for run in runs]
    assert loss_table.rows(summarize(runs))[0][3:5] == ["1.75", ""]


def on(name, seed=0, device="CPU", digest="a", commit=None):
    machine = {"device": device, "precision": "fp32"}
    code = {"sha256": digest, "commit": commit}
    return dataclasses.replace(result(name, seed, 2.0), machine=machine, code=code)


def test_runs_of_different_machines_are_told_apart():
    runs = [on("bf16"), on("metis"), result("older", 0, 2.0)]
    assert outputs.different_machines(runs) == []
    threads = [on(f"{n}", device=f"CPU, {n} threads") for n in (1, 2)]
    assert outputs.different_machines(threads) == []
    runs[1] = on("metis", device="NVIDIA H200")
    (sentence,) = outputs.different_machines(runs)
    assert sentence.endswith("CPU in fp32: bf16; NVIDIA H200 in fp32: metis.")


def test_runs_of_different_code_are_told_apart():
    """Schemes are added to a directory later, when the package may be another one."""
    older = result("older", 0, 2.0)
    assert outputs.different_code([on("bf16"), on("metis"), older]) == []
    both = f"{'a' * 9}+{'b' * 9}"
    runs = [on("bf16", 0, "", "a" * 9, "f0c8b0c"), on("metis", 0, "", both, "f0c8b0c"), older]
    (said,) = outputs.different_code(runs)
    assert said.endswith("alone. f0c8b0c aaaaaa: bf16; f0c8b0c aaaaaa+bbbbbb: metis.")


@pytest.mark.parametrize("differ", [outputs.different_machines, outputs.different_code])
def test_what_trained_another_seed_does_not_matter(differ):
    """Gaps are paired by seed."""
    runs = [on("bf16", 0, *"aa"), on("x", 0, *"aa"), on("bf16", 1, *"bb"), on("x", 1, *"bb")]
    assert differ(runs) == []
    (said,) = differ([*runs, on("bf16", 2, *"cc"), on("y", 2, *"dd")])
    assert "bf16" in said
    assert "y" in said
    assert "x" not in said.partition("alone. ")[2]


def test_a_control_that_diverged_leaves_no_gap():
    """A finite loss over an infinite one would be 100 % below it."""
    runs = [result("bf16", 0, 3.0), result("bf16", 1, math.inf)]
    runs += [result("x", seed, 3.1) for seed in (0, 1)]
    control, other = summarize(runs)
    assert control.diverged == (1,)
    assert math.isnan(other.gap.mean)
    assert not other.gap.excludes_zero
    assert loss_table.rows([control, other])[1][2] == "+nan"


def test_extra_multiply_adds_of_fused_experts_are_not_counted():
    """Which tokens an expert sees, nobody knows beforehand; the comparison still has its table."""
    model = {
        "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 2,
    }  # fmt: skip
    run = dataclasses.replace(result("nvfp4", 0, 2.0), config=MetisConfig(scheme="nvfp4").to_dict())
    found = outputs.count_extra(model, [run])
    assert found.keys() == {"nvfp4"}
    assert math.isnan(found["nvfp4"])
    assert "Extra multiply-adds, %" not in loss_table.header(summarize([run], extra=found))
    size = SIZES["tiny"]
    llama = {"model_type": size.model_type, **size.config}
    assert outputs.count_extra(llama, [run]) == {"nvfp4": 0.0}


def test_times_of_runs_that_shared_a_machine_are_not_shown(tmp_path):
    """They are no measurement; the CSV has them, as every number."""
    runs = [result("bf16", 0, 2.0), result("x", 0, 2.1)]
    summaries = summarize(runs)
    for timed in (True, False):
        outputs.write_tables(summaries, runs, tmp_path, ["title"], None, timed=timed)
        for kind in ("md", "tex"):
            text = (tmp_path / f"table.{kind}").read_text()
            assert ("s/step" in text) == ("x control" in text) == timed
            assert "MB" in text
        assert "seconds_per_step" in (tmp_path / "table.csv").read_text()
        cells = loss_table.rows(summaries, timed=timed)
        assert {len(row) for row in cells} == {len(loss_table.header(summaries, timed=timed))}


def test_figures_of_gaps_that_are_gone_are_removed(tmp_path):
    both = [result("bf16", 0, 2.0, curve=[3.0, 2.5]), result("x", 0, 2.1, curve=[3.0, 2.5])]
    for runs, left in ((both, True), (both[1:], False)):
        summaries = summarize(runs, extra={"bf16": 0.0, "x": 1.0})
        outputs.write_tables(summaries, runs, tmp_path, ["title"], None, timed=True)
        found = [(tmp_path / name).exists() for name in ("loss.png", "gap.png", "cost.png")]
        assert found == [True, left, left]


@pytest.mark.slow
def test_every_figure_shows_a_variant_alike(tmp_path, monkeypatch):
    """Tables of many variants are in the order of their losses, curves in that of the runs."""
    seen = []
    monkeypatch.setattr(
        outputs.loss_figures, "plot_gaps", lambda s, r, styles, *_: seen.append(styles)
    )
    monkeypatch.setattr(
        outputs.loss_figures, "plot_costs", lambda s, styles, *_: seen.append(styles)
    )
    names = ["bf16", *(f"v{9 - n}" for n in range(9)), "cost $k_1_2$", "_hidden"]
    runs = [result(name, 0, 2.0 + n / 9, curve=[3.0, 2.5]) for n, name in enumerate(names)]
    summaries = loss_table.ordered(summarize(runs[:1] + runs[:0:-1]))
    outputs.write_tables(summaries, runs, tmp_path, ["$title_1_2$"], None, timed=True)
    assert seen == [scheme_styles(names)] * 2
    monkeypatch.undo()
    outputs.write_tables(summaries, runs, tmp_path, ["title"], None, timed=True)
    assert not (tmp_path / "cost.png").exists()  # no multiply-adds were counted
    extra = {name: float(place) for place, name in enumerate(names)}
    summaries = loss_table.ordered(summarize(runs, extra=extra))
    # Names are no formulas.
    outputs.write_tables(summaries, runs, tmp_path, ["$title_1_2$"], None, timed=True)
    assert (tmp_path / "cost.png").stat().st_size > 10_000


def test_a_figure_of_curves_shows_six_and_names_the_others(tmp_path, monkeypatch):
    """The control and the reference, the best and the worst, and some between."""
    names = ["bf16", *(f"variant {n}" for n in range(9)), "diverged"]
    losses = [2.0, *(2.1 + n / 10 for n in range(9)), math.nan]
    runs = [result(name, seed, loss + seed / 100, curve=[3.0, 2.5 + seed / 100])
            for name, loss in zip(names, losses) for seed in (0, 1)]  # fmt: skip
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    plot_curves(runs, tmp_path / "loss.png", "a title", "variant 1")
    top, bottom = figures[0].axes
    shown = [line.get_label() for line in top.lines]
    assert shown == ["bf16", *(f"variant {n}" for n in (0, 1, 3, 6, 8))]
    assert top.get_title() == "a title"
    assert "training loss above bf16" in bottom.get_ylabel()
    below = " ".join(bottom.get_xlabel().split())
    assert "only in the table: variant 2, variant 4, variant 5, variant 7, diverged" in below
    gray = [band.get_facecolor()[0, :3].tolist() for band in top.collections]
    assert gray[0] == [0, 0, 0]  # the control's seeds, drawn pale
    assert top.collections[0].get_alpha() < 0.3


def test_losses_are_compared_step_by_step():
    """The control's result is of a version that did not log measured steps, such as the first."""

    def run(scheme, seed, losses):
        history = [{"step": step, "loss": loss} for step, loss in losses.items()]
        return dataclasses.replace(result(scheme, seed, 1.0), history=history)

    results = [
        run("bf16", 0, {10: 2.0, 20: 1.0}),
        run("metis", 0, {1: 8.0, 10: 2.2, 20: 1.1}),
        run("bf16", 1, {10: 2.0, 20: 1.0}),
        run("metis", 1, {10: 2.0, 20: 1.0}),
    ]
    steps, gaps = paired_gaps(results, "metis", 1)
    assert steps == [10, 20]
    assert gaps == [pytest.approx([10, 10]), [0, 0]]
    assert curves(results)["metis"] == ([10, 20], [[2.2, 1.1], [2.0, 1.0]])
    assert paired_gaps(results[1:2], "metis", 1) == ([], [])


def test_a_curve_of_one_step_is_drawn_without_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curves([result("bf16", 0, 2.0, curve=[2.0])], tmp_path / "loss.png", "title")
