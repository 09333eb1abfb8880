"""Plans of comparisons: what a comparison is made of, and what is refused before it begins."""

from __future__ import annotations

import math

import pytest
import yaml
from transformers import AutoConfig

from metis_hf import MetisConfig, scheme_names
from metis_hf.lab.compare import training as trainings
from metis_hf.lab.compare.plan import directory_name, make_plan, with_accumulation
from metis_hf.lab.compare.presets import PRESETS
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.compare.training import training_arguments
from metis_hf.lab.compare.variants import Variant
from metis_hf.lab.cost import meta_model
from metis_hf.schemes import build_scheme


def metis(**fields):
    return {"variants": {"mine": {"scheme": "metis", **fields}}}


def named(*names):
    return {"schemes": ["bf16"], "variants": {name: {"scheme": "metis"} for name in names}}


REFUSED = (
    ({"training": {"seed": 99}}, "training: seed cannot be set .* key seeds, or --seeds"),
    ({"training": {"num_train_epochs": 2}}, "set tokens, or training: {max_steps"),
    (
        {"training": {"eval_strategy": "steps"}},
        "eval_strategy cannot be set .* measured when a run ends",
    ),
    ({"training": {"learning_rte": 1.0}}, r"'learning_rte'.*did you mean 'learning_rate'"),
    ({"training": {"max_steps": -1}}, "training: max_steps: -1; expected a whole number, at"),
    ({"training": {"max_steps": 1.5}}, "training: max_steps: 1.5; expected a whole"),
    ({"training": {"lr_scheduler_type": "cosin"}}, "training: cosin is not a valid"),
    ({"training": {"learning_rate": "fast"}}, "learning_rate: 'fast'; expected a number from 0 up"),
    ({"training": {"learning_rate": -1}}, "learning_rate: -1; expected a number from 0 up"),
    ({"training": {"adam_beta2": 2}}, "adam_beta2: 2; expected a number from 0 up and below 1"),
    ({"training": {"report_to": "tensorbord"}}, "report_to: tensorbord is not supported"),
    ({"training": {"run_name": "a"}}, "run_name cannot be set .* its variant and seed"),
    ({"training": [1]}, r"training: \[1\] is not a mapping"),
    ({"global_batch": 0}, "global_batch: 0; expected a whole number, at least 1"),
    ({"sequence_length": True}, "sequence_length: True; expected"),
    ({"sequence_length": 4096}, "sequence_length=4096 does not fit in the model's context of"),
    ({"health_interval": -1}, "health_interval: -1; expected a whole number, at least 0"),
    ({"tokens": "many"}, "tokens: 'many'; expected a positive number"),
    ({"tokens": -1}, "tokens: -1; expected a positive number"),
    (
        {"tokens": 1e6, "training": {"max_steps": 10}},
        "tokens=1e\\+06 and training: {max_steps: 10} both set the length of a run",
    ),
    ({"data": "d", "validation": "d"}, "validation=.*d is the training data"),
    ({"seeds": [-1]}, "seeds: -1; expected a whole number, from 0 to 4294967295"),
    ({"seeds": 3}, "seeds: 3 is not a list; write seeds:"),
    ({"seeds": [0, 0]}, "seed 0 is given more than once"),
    ({"schemes": "bf16"}, "schemes: 'bf16' is not a list"),
    ({"schemes": []}, "schemes: the list is empty"),
    ({"schemes": [1]}, "schemes: 1; expected a string"),
    ({"preset": ["main"]}, r"preset: \['main'\]; expected a string"),
    ({"tasks_dir": ["x"]}, r"tasks_dir: \['x'\]; expected a string"),
    ({"model": {"hiden_size": 192}}, "llama has no 'hiden_size'; did you mean 'hidden_size'"),
    ({"model": {"hidden_size": "x"}}, "model: .* 'hidden_size' expected int, got str"),
    ({"model": {"num_attention_heads": 5}}, "model: .* not a multiple of the number of"),
    ({"model": {"model_type": "lama"}}, "model: Unrecognized model identifier: lama"),
    ({"model": {"model_type": "t5"}}, "model: t5 is not a causal language model; choose"),
    ({"model": {"model_type": "bert"}}, "bert is an encoder: .* set is_decoder: true"),
    (
        {"model": {"vocab_size": 100}},
        "vocab_size=100 is too small to tokenize text, which takes 257 tokens",
    ),
    ({"model": {1: 2}}, "a key of model: 1; expected a string"),
    ({"variants": {"a": {"scheme": ["x"]}}}, r"variants: a: scheme: \['x'\]; expected a"),
    ({"variants": {"a": None}}, "variants: a: None is not a mapping"),
    ({"variants": {"a": {"rank": 2}}}, "'a' names no scheme"),
    ({"variants": {"bf16": {"scheme": "nvfp4"}}}, r"'bf16' has scheme 'nvfp4', .* another name"),
    (metis(seed=5), "variant 'mine' sets seed, which"),
    (metis(precision_schedule="late"), "mine: precision_schedule: .* is not a mapping"),
    (
        metis(precision_schedule={"after": 0.5}),
        "'mine': precision_schedule takes the keys at, .*'after'",
    ),
    (metis(precision_schedule={"at": -1}), "at=-1"),
    ({"reference": "metsi"}, "'metsi' is not one of the variants; choose from bf16,"),
    ({"reference": "bf16"}, "reference 'bf16' is the control"),
    # "../.." and the like lose their slashes; what is left of them names no run either.
    *(
        (named(name), "has no usable directory name for its runs; choose a name")
        for name in ("%", "../..", " ")
    ),
    (named("a b", "a-b"), "variants 'a b' and 'a-b' would share the directory a-b"),
    (named("Rank", "rank"), "variants 'Rank' and 'rank' would share"),
    (named("bf16"), "variant 'bf16' is given more than once"),
    (
        named(*(f"v{n}" for n in range(36))),
        "one figure cannot show 36 schemes, because only 35 can be",
    ),
)


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
        # What metis leaves out by itself is added.
        by_name = {v.name: v.metis_config(0).decompose for v in PRESETS["ablations-metis"]()}
        assert by_name["metis with weight split"] == ("weight", "activation", "gradient")
        assert by_name["metis w/o activation split"] == ("gradient",)
        assert by_name["metis w/o gradient split"] == ("activation",)

    def test_rank_sweep_has_the_paper_range(self):
        shares = [v.metis_config(0).rank_frac for v in PRESETS["rank"]()[1:]]
        assert shares == [0.015, 0.03, 0.0625, 0.125]

    @pytest.mark.parametrize(
        ("preset", "parameters", "steps"), [("30m", 51_450_000, 700), ("130m", 98_400_000, 1000)]
    )
    def test_the_ladder_has_real_models_and_32k_tokens_a_step(self, preset, parameters, steps):
        plan = make_plan(preset=preset, needs_data=False)
        experiment = plan.experiment
        model = meta_model(AutoConfig.for_model(**experiment.model))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)
        assert plan.global_batch * experiment.sequence_length == 32_768
        assert (experiment.steps, plan.seeds) == (steps, (0, 1, 2))
        shares = [v.metis_config(0).rank_frac for v in plan.variants if "rank" in v.name]
        assert shares == ([0.015, 0.18] if preset == "30m" else [])

    def test_all_schemes_are_those_of_the_registry(self):
        plan = make_plan(schemes=["all"], variants={"mine": {"scheme": "metis", "rank": 2}})
        assert [v.name for v in plan.variants] == [*scheme_names(), "mine"]

    def test_every_scheme_with_a_split_weight(self):
        """Nothing but the stored form differs; what is stored split anyhow is there once.

        Schemes of deployed layers, which have no factors, are left out.
        """
        plan = make_plan(preset="split")
        assert [v.name for v in plan.variants[:2]] == ["bf16", "bf16-split"]
        others = ("bf16", "bf16-split", "w4a4", "w4a16")
        quantized = [name for name in scheme_names() if name not in others]
        for name, variant in zip(quantized, plan.variants[2:], strict=True):
            config = variant.metis_config(0)
            assert build_scheme(config, 64, 64).weight.is_split
            if name in ("metis-paper", "svdquant", "metis-released", "mean-released"):
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

    def test_fields_with_a_precision_schedule_come_back(self):
        fields = {"scheme": "metis", "rank": 4, "precision_schedule": {"at": 0.5}}
        (variant,) = make_plan(variants={"mine": fields}).variants
        assert variant.metis_config(0).rank == 4
        assert variant.fields() == fields

    def test_options_win_over_the_file(self, tmp_path):
        file = tmp_path / "x.yaml"
        file.write_text(
            "schemes: [bf16, nvfp4]\nseeds: [3]\ntraining: {learning_rate: 1e-3}\ntokens: 1e6\n"
            "variants:\n  mine: {scheme: metis, rank: 4}\n"
        )
        plan = make_plan(file, seeds=[5, 6])
        assert plan.seeds == (5, 6)
        assert [v.name for v in plan.variants] == ["bf16", "nvfp4", "mine"]
        assert plan.variants[-1].metis_config(7).rank == 4
        assert plan.variants[-1].metis_config(7).seed == 7
        # In YAML 1.1, 1e-3 is a string; what reaches TrainingArguments is a number.
        assert plan.experiment.training["learning_rate"] == 1e-3
        assert plan.experiment.steps == round(1e6 / (32 * 128))

    def test_unknown_key_is_named(self, tmp_path):
        file = tmp_path / "x.yaml"
        file.write_text("seed: 1\n")
        with pytest.raises(ValueError, match="no key 'seed'; did you mean 'seeds'"):
            make_plan(file)

    def test_keys_of_a_model_by_any_name_that_transformers_knows(self):
        names = {"hidden_size": 192, "n_head": 3, "attn_implementation": "eager"}
        model = make_plan(size="130m", model=names, needs_data=False).experiment.model
        assert names.items() <= model.items()
        make_plan(model={"rope_theta": 1e6, "num_attention_heads": 2})

    def test_half_precision_of_another_kind_is_taken(self, tmp_path, monkeypatch):
        monkeypatch.setattr(trainings, "bf16_units", lambda: True)
        for training, expected in (({}, True), ({"fp16": True}, False)):
            experiment = make_plan(training=training).experiment
            assert training_arguments(experiment, tmp_path / "run").bf16 is expected
        assert not (tmp_path / "run").exists()

    def test_directory_names(self):
        assert directory_name("metis-paper w/o weight split") == "metis-paper-wo-weight-split"
        assert directory_name("rank 1.5%") == "rank-1.5"

    @pytest.mark.parametrize(("options", "message"), REFUSED)
    def test_what_a_comparison_cannot_be(self, options, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            make_plan(**options)
        file = tmp_path / "x.yaml"
        file.write_text(yaml.safe_dump(options))
        with pytest.raises(ValueError, match=message):
            make_plan(file)

    def test_what_may_be_set(self):
        """Clipping that is off; a variant of the control's name that is the control."""
        for norm in (0, -1, math.inf):
            plan = make_plan(training={"max_grad_norm": norm})
            assert plan.experiment.training["max_grad_norm"] == norm
        make_plan(variants={"bf16": {"scheme": "bf16"}})

    def test_the_reference_is_metis_where_it_takes_part(self):
        assert make_plan().reference == "metis"
        assert make_plan(schemes=["bf16", "nvfp4"]).reference is None
        plan = make_plan(schemes=["bf16", "nvfp4", "metis"], reference="nvfp4")
        assert plan.reference == "nvfp4"
        assert plan.settings() == make_plan(schemes=["bf16"]).settings()  # decides no run

    def test_a_batch_is_divided_among_processes(self):
        plan = make_plan(training={"per_device_train_batch_size": 32}, global_batch=48)
        training = with_accumulation(plan.experiment, 48, processes=2).training
        assert training["per_device_train_batch_size"] == 24
        assert training["gradient_accumulation_steps"] == 1
        with pytest.raises(ValueError, match="global_batch=48 is not a multiple of 1 processes x"):
            with_accumulation(plan.experiment, 48, processes=1)
