"""Plans, statistics and tables of comparisons, without training."""

from __future__ import annotations

import math
import re
import typing

import pytest
import scipy.stats
import yaml
from hypothesis import given
from hypothesis import strategies as st

from metis_hf import MetisConfig, scheme_names
from metis_hf.commands import compare as command
from metis_hf.experiments.compare import cost_figure, table
from metis_hf.experiments.compare.plan import directory_name, make_plan
from metis_hf.experiments.compare.presets import PRESETS
from metis_hf.experiments.compare.statistics import Interval, summarize, t_interval
from metis_hf.experiments.figures import paired_gaps
from metis_hf.experiments.results import SchemeResult
from metis_hf.experiments.sizes import SIZES
from metis_hf.experiments.variants import Variant
from metis_hf.schemes import build_scheme
from metis_hf.shared.figures import figure_axes


def result(scheme, seed, loss, tasks=None, curve=(), seconds=0.1, dense=None):
    history = [{"step": i + 1, "loss": value} for i, value in enumerate(curve)]
    values = {
        task: {"metric": "acc", "value": v, "stderr": 0.1} for task, v in (tasks or {}).items()
    }
    return SchemeResult(
        scheme, {}, "", loss, values, seconds, history,
        seed=seed, peak_memory=10**6, parameters=5, loss_dense=dense,
    )  # fmt: skip


class TestPlan:
    def test_defaults_are_the_main_table_at_tiny_size(self):
        plan = make_plan()
        names = [variant.name for variant in plan.variants]
        assert names == ["bf16", "bf16-split", "nvfp4", "nvidia", "metis-paper", "metis"]
        assert plan.seeds == (0, 1, 2)
        assert plan.tokens == SIZES["tiny"].tokens

    def test_ablations_switch_off_one_part_each(self):
        by_name = {v.name: v.metis_config(0) for v in PRESETS["ablations"]()}
        full = by_name["metis-paper"]
        assert full.decompose is None
        tensors = {"weight", "activation", "gradient"}
        for tensor in tensors:
            config = by_name[f"metis-paper w/o {tensor} split"]
            assert tensors - set(config.decompose) == {tensor}
            assert config.sample_frac == full.sample_frac
        assert by_name["metis-paper w/o sampling"].sample_frac == 1.0

    def test_ablations_of_metis_add_what_it_leaves_out(self):
        by_name = {v.name: v.metis_config(0).decompose for v in PRESETS["ablations-metis"]()}
        assert by_name["metis with weight split"] == ("weight", "activation", "gradient")
        assert by_name["metis w/o activation split"] == ("gradient",)
        assert by_name["metis w/o gradient split"] == ("activation",)

    def test_rank_sweep_has_the_paper_range(self):
        shares = [v.metis_config(0).rank_frac for v in PRESETS["rank"]()[1:]]
        assert shares == [0.015, 0.03, 0.0625, 0.125]

    def test_all_schemes_are_those_of_the_registry(self):
        plan = make_plan(schemes=["all"], variants={"mine": {"scheme": "metis", "rank": 2}})
        assert [v.name for v in plan.variants] == [*scheme_names(), "mine"]

    def test_every_scheme_with_a_split_weight(self):
        """Nothing but the stored form differs; what is stored split anyhow is there once."""
        plan = make_plan(preset="split")
        assert [v.name for v in plan.variants[:2]] == ["bf16", "bf16-split"]
        quantized = [name for name in scheme_names() if not name.startswith("bf16")]
        for name, variant in zip(quantized, plan.variants[2:], strict=True):
            config = variant.metis_config(0)
            assert build_scheme(config, 64, 64).weight.is_split
            if name in ("metis-paper", "svdquant"):
                assert variant == Variant.of_scheme(name)
            else:
                assert config == MetisConfig(scheme=name, split_weight=True)
                assert not build_scheme(MetisConfig(scheme=name), 64, 64).weight.is_split

    def test_precision_switch_is_the_scheme_with_a_schedule(self):
        by_name = {v.name: v for v in make_plan(preset="switch").variants}
        for scheme in ("nvidia", "metis"):
            assert by_name[scheme].callbacks() == []
            both = by_name[f"{scheme}, both in bf16 from 80%"]
            assert both.config == by_name[scheme].config
            (schedule,) = both.callbacks()
            assert [schedule.is_high(step, 780) for step in (623, 624)] == [False, True]
            assert schedule.high_precision == ("forward", "backward")
            (schedule,) = by_name[f"{scheme}, forward in bf16 from 80%"].callbacks()
            assert schedule.high_precision == ("forward",)

    @pytest.mark.parametrize("schedule", [{"at": 0.5}, {"at": 3, "high_precision": ["backward"]}])
    def test_fields_with_a_precision_schedule_come_back(self, schedule):
        fields = {"scheme": "metis", "rank": 4, "precision_schedule": schedule}
        (variant,) = make_plan(variants={"mine": fields}).variants
        assert variant.metis_config(0).rank == 4
        assert variant.fields() == fields

    def test_precision_schedule_of_other_arguments_is_named(self):
        fields = {"scheme": "metis", "precision_schedule": {"after": 0.5}}
        with pytest.raises(ValueError, match=r"'mine': precision_schedule is .*'after'"):
            make_plan(variants={"mine": fields})
        fields["precision_schedule"] = {"at": -1}
        with pytest.raises(ValueError, match="at=-1"):
            make_plan(variants={"mine": fields})

    def test_options_win_over_the_file(self, tmp_path):
        file = tmp_path / "x.yaml"
        file.write_text(
            "schemes: [bf16, nvfp4]\nseeds: [3]\ntraining: {learning_rate: 1e-3}\n"
            "variants:\n  mine: {scheme: metis, rank: 4}\n"
        )
        plan = make_plan(file, seeds=[5, 6])
        assert plan.seeds == (5, 6)
        assert [v.name for v in plan.variants] == ["bf16", "nvfp4", "mine"]
        assert plan.variants[-1].metis_config(7).rank == 4
        assert plan.variants[-1].metis_config(7).seed == 7

    def test_numbers_in_yaml_keep_their_type(self, tmp_path):
        """In YAML 1.1, 1e-3 is a string; what reaches TrainingArguments is a number."""
        file = tmp_path / "x.yaml"
        file.write_text("training: {learning_rate: 1e-3}\ntokens: 1e6\n")
        plan = make_plan(file)
        assert plan.experiment.training["learning_rate"] == 1e-3
        assert plan.experiment.steps == round(1e6 / (32 * 128))

    def test_unknown_key_is_named(self, tmp_path):
        file = tmp_path / "x.yaml"
        file.write_text("seed: 1\n")
        with pytest.raises(ValueError, match="no key 'seed'; did you mean 'seeds'"):
            make_plan(file)

    def test_unknown_training_argument_is_named(self):
        with pytest.raises(ValueError, match=r"'learning_rte'.*did you mean 'learning_rate'"):
            make_plan(training={"learning_rte": 1.0})

    def test_variant_without_a_scheme(self):
        with pytest.raises(ValueError, match="'mine' names no scheme"):
            make_plan(variants={"mine": {"rank": 2}})

    def test_directory_names(self):
        assert directory_name("metis-paper w/o weight split") == "metis-paper-wo-weight-split"
        assert directory_name("rank 1.5%") == "rank-1.5"

    @pytest.mark.parametrize("name", ["", ".", "..", "...", "/", "%", "../..", " "])
    def test_a_name_that_leaves_its_folder(self, name):
        """ "../.." and the like lose their slashes; what is left of them names no run either."""
        with pytest.raises(ValueError, match="gives its runs no directory; choose a name"):
            make_plan(variants={name: {"scheme": "metis"}})

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("a b", "a-b"), "variants 'a b' and 'a-b' would share the directory a-b"),
            (("a%", "a"), "variants 'a%' and 'a' would share"),
            (("Rank", "rank"), "variants 'Rank' and 'rank' would share"),
            (("bf16",), "variant 'bf16' is given more than once"),
        ],
    )
    def test_names_that_would_share_a_directory(self, names, message):
        variants = {name: {"scheme": "metis"} for name in names}
        with pytest.raises(ValueError, match=message):
            make_plan(schemes=["bf16"], variants=variants)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"training": {"seed": 99}}, "training: seed is not for you .* key seeds, or --seeds"),
            ({"training": {"output_dir": "X"}}, "training: output_dir is not .* below --out"),
            ({"training": {"gradient_accumulation_steps": 2}}, "it follows from global_batch"),
            ({"training": {"logging_strategy": "no"}}, "say how many are by logging_steps"),
            ({"training": {"num_train_epochs": 2}}, "say tokens, or training: {max_steps"),
            (
                {"training": {"max_steps": -1}},
                "training: max_steps: -1; expected a whole number, at",
            ),
            ({"training": {"max_steps": 1.5}}, "training: max_steps: 1.5; expected a whole"),
            ({"global_batch": -4}, "global_batch: -4; expected a whole number, at least 1"),
            ({"global_batch": 0}, "global_batch: 0; expected"),
            ({"sequence_length": True}, "sequence_length: True; expected"),
            ({"eval_sequences": 0}, "eval_sequences: 0; expected"),
            ({"health_interval": -1}, "health_interval: -1; expected a whole number, at least 0"),
            ({"tokens": "many"}, "tokens: 'many'; expected a positive number"),
            ({"tokens": -1}, "tokens: -1; expected a positive number"),
            ({"seeds": [-1]}, "seeds: -1; expected a whole number, from 0 to 4294967295"),
            ({"seeds": 3}, "seeds: 3 is not a list; write seeds:"),
            ({"schemes": "bf16"}, "schemes: 'bf16' is not a list"),
            ({"training": [1]}, r"training: \[1\] is not a mapping"),
            ({"variants": {"a": None}}, "variants: a: None is not a mapping"),
            ({"variants": {"a": {"scheme": "metis", "seed": 5}}}, "variant 'a' sets seed, which"),
            (
                {"reference": "metsi"},
                "'metsi' is none of the variants; choose from bf16,",
            ),
            ({"reference": "bf16"}, "reference 'bf16' is the control"),
            (
                {"variants": {f"v{n}": {"scheme": "metis", "rank": n + 1} for n in range(36)}},
                "36 schemes in one picture; only 35 can be told apart",
            ),
        ],
    )
    def test_what_a_comparison_sets_itself_or_cannot_be(self, options, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            make_plan(**options)
        file = tmp_path / "x.yaml"
        file.write_text(yaml.safe_dump(options))
        with pytest.raises(ValueError, match=message):
            make_plan(file)

    def test_the_reference_is_metis_where_it_takes_part(self):
        assert make_plan().reference == "metis"
        assert make_plan(schemes=["bf16", "nvfp4"]).reference is None
        plan = make_plan(schemes=["bf16", "nvfp4", "metis"], reference="nvfp4")
        assert plan.reference == "nvfp4"
        assert plan.settings() == make_plan(schemes=["bf16"]).settings()  # decides no run

    def test_help_lists_every_preset_and_size(self):
        hints = typing.get_type_hints(command.compare, include_extras=True)
        for name, known in (("preset", PRESETS), ("size", SIZES)):
            (option,) = typing.get_args(hints[name])[1:]
            assert set(re.split(", | or |; ", option.help)) >= set(known)


class TestInterval:
    @given(st.lists(st.floats(-5, 5), min_size=2, max_size=8, unique=True))
    def test_is_that_of_a_t_test(self, values):
        ours = t_interval(values)
        theirs = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert ours.mean - ours.half_width == pytest.approx(theirs.low, rel=1e-6, abs=1e-9)
        assert ours.mean + ours.half_width == pytest.approx(theirs.high, rel=1e-6, abs=1e-9)

    def test_one_value_has_no_width(self):
        found = t_interval([2.0])
        assert found.mean == 2.0
        assert math.isnan(found.half_width)
        assert not found.excludes_zero

    def test_not_finite_is_not_averaged(self):
        assert math.isnan(t_interval([1.0, math.nan]).mean)
        assert math.isnan(t_interval([1.0, math.inf]).mean)

    def test_excludes_zero(self):
        assert Interval(1.0, 0.9, 3).excludes_zero
        assert not Interval(-1.0, 1.1, 3).excludes_zero


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

    def test_the_gap_without_quantizers_is_to_the_controls_loss(self):
        runs = [("bf16", 2.0, 2.0), ("x", 2.2, 2.1), ("old", 2.4, None)]
        summaries = summarize([result(*run[:1], 0, run[1], dense=run[2]) for run in runs])
        assert summaries[0].gap_dense is None
        assert summaries[1].gap_dense.mean == pytest.approx(5.0)
        assert summaries[2].gap_dense is None
        place = table.header(summaries).index("Gap dense, %")
        assert [row[place] for row in table.rows(summaries)] == ["", "+5.00", ""]
        assert "gap_dense_percent" in table.as_csv(summaries).splitlines()[0]
        older = summarize([result("bf16", 0, 2.0), result("x", 0, 2.2)])
        assert "Gap dense, %" not in table.header(older)
        assert all(len(row) == len(table.header(older)) for row in table.rows(older))

    @pytest.mark.parametrize("name", ["metis", "mine"])
    def test_what_is_above_the_reference_is_paired_too(self, name):
        """Schemes with the same mean gap differ by how surely they are above the reference."""
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
        found = table.findings(list(by_name.values()), name)
        assert f"Above {name}, paired by seed: sure." in found
        assert f"Not told apart from {name}, paired by seed: wild." in found
        assert table.header(list(by_name.values()), name)[3] == f"Above {name}, %"
        assert table.rows(list(by_name.values()))[3][3] == "+2.00 ± 0.00"

    def test_a_diverged_seed_is_named_not_averaged_away(self):
        results = [
            *(result("bf16", s, 2.0) for s in (0, 1)),
            result("x", 0, 2.1),
            result("x", 1, math.nan),
        ]
        summaries = summarize(results)
        assert math.isnan(summaries[1].mean)
        assert summaries[1].diverged == (1,)
        assert "nan" in table.rows(summaries)[1][1]
        assert any("x diverged with seed 1" in text for text in table.findings(summaries))
        assert table.best(summaries) == "bf16"

    def test_tasks_average(self):
        results = [result("bf16", s, 2.0, {"a": v, "b": 0.5}) for s, v in ((0, 0.2), (1, 0.4))]
        (summary,) = summarize(results)
        assert summary.tasks == pytest.approx({"a": 0.3, "b": 0.5})
        assert summary.average == pytest.approx(0.4)


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
        rows = table.rows(summaries)
        assert rows[0] == ["bf16", "2.1000 ± 0.1000", "", "0.100", "1.00", "1"]
        assert rows[1][2].startswith("-4.77 ± ")
        assert rows[2][4] == "3.00"

    def test_many_variants_are_ordered_by_loss(self, summaries):
        assert table.ordered(summaries) == summaries
        losses = {"bf16": 2.0, "worst": 9.0, "lost": math.nan, "best": 1.0}
        losses |= {f"x{i}": 3.0 + i for i in range(5)}
        names = [
            s.name for s in table.ordered(summarize([result(n, 0, v) for n, v in losses.items()]))
        ]
        assert names == ["bf16", "best", "x0", "x1", "x2", "x3", "x4", "worst", "lost"]

    def test_best_is_bold(self, summaries):
        assert "| bf16-split | **2.0000 ± 0.1000** |" in table.markdown(summaries)
        assert "\\textbf{2.0000 $\\pm$ 0.1000}" in table.latex(summaries)
        assert "a\\_b" in table.latex(summaries)

    def test_findings_say_what_can_be_told(self, summaries):
        found = table.findings(summaries)
        assert "Below the control, paired by seed: bf16-split." in found
        assert "Not told apart from the control, paired by seed: a_b." in found
        assert any("by itself lowers the loss" in text for text in found)

    def test_csv_has_each_seed_in_full(self, summaries):
        lines = table.as_csv(summaries).splitlines()
        assert lines[0].split(",")[3:6] == ["loss_seed_0", "loss_seed_1", "loss_seed_2"]
        assert lines[1].split(",")[4] == "2.1"


def test_gaps_over_time_are_paired():
    results = [
        result("bf16", 0, 1.0, curve=[4.0, 2.0]),
        result("bf16", 1, 1.0, curve=[8.0, 4.0]),
        result("x", 0, 1.0, curve=[4.4, 2.0]),
        result("x", 1, 1.0, curve=[8.0, 4.4]),
    ]
    steps, gaps = paired_gaps(results, "x", 1)
    assert steps == [1, 2]
    assert [[round(v, 6) for v in row] for row in gaps] == [[10.0, 0.0], [0.0, 10.0]]


@pytest.mark.parametrize(("far", "scale"), [(2.3, "linear"), (3.0, "symlog")])
def test_one_far_gap_leaves_room_for_the_others(far, scale, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        cost_figure, "figure_axes", lambda *args: made.append(figure_axes(*args)) or made[-1]
    )
    losses = {"bf16": 2.0, "a": 2.1, "b": 2.12, "c": 2.1, "far": far}
    extra = {name: float(place) for place, name in enumerate(losses)}
    results = [result(name, 0, loss) for name, loss in losses.items()]
    summaries = summarize(results, extra=extra)
    cost_figure.plot_costs(summaries, tmp_path / "cost.png", "title")
    ((_, axes),) = made
    assert axes[0][0].get_yscale() == scale
    low, high = axes[0][0].get_ylim()
    assert low < 0 < 100 * (far / 2 - 1) < high
    assert {text.get_text() for text in axes[0][0].texts} == {"a", "b", "c", "far"}
