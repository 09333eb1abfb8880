"""Command lines of the recipes: what they take, and what they refuse before time is spent."""

from __future__ import annotations

import runpy
import sys

import pytest
from paths import ROOT

from lab.compare.recipe_tools import NAMES, arguments, config_of
from metis_hf.lab.recipe import dry_run, one_line_errors
from metis_hf.shared.locks import hold_directory


class TestArguments:
    def test_defaults_are_the_paper(self):
        given, training = arguments("llama3_8b", "--dry-run")
        assert (given.tokens, given.scheme, training.bf16) == (100e9, "metis", True)
        assert given.metis_config(training.seed).rank_frac == 0.015
        assert training.learning_rate == 1.5e-4

    def test_command_line_over_file_over_smoke_over_defaults(self, tmp_path):
        path = tmp_path / "x.yaml"
        path.write_text(
            "learning_rate: 1e-4\nmax_steps: 7\nscheme: nvfp4\nmetis: {two_level: true}\n"
            "dry_run: false\nlr_scheduler_kwargs: {num_cycles: 2}\n"
        )
        given, training = arguments(
            "llama3_8b", "--smoke", "--config", str(path), "--max_steps", "9"
        )
        assert training.learning_rate == 1e-4  # YAML 1.1 reads a string there
        assert training.max_steps == 9
        assert training.lr_scheduler_kwargs == {"num_cycles": 2}
        assert (given.scheme, given.sequence_length, given.smoke) == ("nvfp4", 64, True)
        assert given.metis_config(3).two_level is True
        assert given.metis_config(3).seed == 3
        assert training.use_cpu

    @pytest.mark.parametrize("word", ["true", "t", "Y", "'1'", "yes"])
    def test_smoke_in_the_file(self, word, tmp_path):
        path = tmp_path / "x.yaml"
        path.write_text(f"smoke: {word}\n")
        given, training = arguments("llama3_8b", "--config", str(path))
        assert given.smoke
        assert training.max_steps == 4
        given, training = arguments("llama3_8b", "--config", str(path), "--smoke", "false",
                                    "--dry-run")  # fmt: skip
        assert not given.smoke
        assert training.max_steps == -1

    def test_unknown_key_in_the_file(self, tmp_path):
        path = tmp_path / "x.yaml"
        path.write_text("learning_rates: 1e-4\n")
        with pytest.raises(ValueError, match=r"no argument 'learning_rates'.*'learning_rate'"):
            arguments("llama3_8b", "--config", str(path))

    def test_a_key_without_a_value(self, tmp_path):
        path = tmp_path / "x.yaml"
        path.write_text("max_steps:\n")
        with pytest.raises(ValueError, match=r"x\.yaml: max_steps has no value; give it one, or"):
            arguments("llama3_8b", "--smoke", "--config", str(path))
        path.write_text("data_seed: null\n")  # as the default is
        _, training = arguments("llama3_8b", "--smoke", "--config", str(path))
        assert training.data_seed is None

    def test_a_file_that_is_no_yaml(self, tmp_path):
        path = tmp_path / "x.yaml"
        with pytest.raises(ValueError, match=r"there is no file .*x\.yaml"):
            arguments("llama3_8b", "--config", str(path))
        path.write_text("metis: [a\n")
        with pytest.raises(ValueError, match=r"x\.yaml is not YAML: while parsing a flow"):
            arguments("llama3_8b", "--config", str(path))

    @pytest.mark.parametrize(
        "argv", [("--learning_rates", "1"), ("--learning_rate", "x"), ("--max_step", "3")]
    )
    def test_wrong_command_line(self, argv, capsys):
        """Nothing is abbreviated or ignored."""
        with pytest.raises((SystemExit, ValueError)):
            arguments("llama3_8b", "--smoke", *argv)

    def test_wrong_type_in_the_file(self, tmp_path, capsys):
        path = tmp_path / "x.yaml"
        path.write_text("max_steps: 1.5\n")
        with pytest.raises(SystemExit):
            arguments("llama3_8b", "--config", str(path))
        assert "max_steps" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("metis", "match"),
        [
            ("{", "not JSON"),
            ("[]", "not a JSON object"),
            ('{"scheme": "bf16"}', "--scheme bf16"),
            ('{"rank_fraction": 1}', "did you mean 'rank_frac'"),
        ],
    )
    def test_wrong_metis(self, metis, match):
        given, _ = arguments("llama3_8b", "--smoke", "--metis", metis)
        with pytest.raises(ValueError, match=match):
            given.metis_config(0)

    def test_epochs(self):
        with pytest.raises(ValueError, match=r"num_train_epochs=1\.0: --tokens says how long"):
            arguments("llama3_8b", "--smoke", "--num_train_epochs", "1")

    def test_a_checkpoint_to_resume_from(self):
        with pytest.raises(ValueError, match="a run goes on from its own --output_dir"):
            arguments("llama3_8b", "--smoke", "--resume_from_checkpoint", "runs/other/checkpoint-5")

    def test_an_interval_below_zero(self):
        with pytest.raises(ValueError, match="--health_interval -1; expected at least 0"):
            arguments("llama3_8b", "--smoke", "--health_interval", "-1")

    @pytest.mark.parametrize("tokens", ["inf", "nan"])
    def test_tokens_that_are_no_number_of_them(self, tokens):
        with pytest.raises(ValueError, match=f"--tokens {tokens}; expected a finite number"):
            arguments("llama3_8b", "--dry-run", "--tokens", tokens)

    @pytest.mark.parametrize("options", [("--world_size", "8"), ("--json",)])
    def test_options_of_a_dry_run_without_it(self, options):
        with pytest.raises(ValueError, match=f"{options[0]} changes only what --dry_run prints"):
            arguments("llama3_8b", "--smoke", *options)

    def test_no_processes_to_plan_for(self):
        given, training = arguments("llama3_8b", "--dry-run", "--world-size", "0")
        with pytest.raises(ValueError, match="world_size=0; expected at least 1"):
            dry_run(config_of("llama3_8b"), given, training)

    def test_sequences_beyond_the_context_are_not_planned(self):
        given, training = arguments("gpt2_130m", "--dry-run", "--sequence-length", "2048")
        with pytest.raises(ValueError, match="2048 does not fit the model's context of 1024"):
            dry_run(config_of("gpt2_130m"), given, training)

    def test_transformers_without_the_new_name_of_checkpointing(self, monkeypatch):
        """All that Python 3.10 has."""
        given, training = arguments("llama3_8b", "--dry-run")
        assert not given.workload(training, 8).checkpointing
        monkeypatch.delattr(type(training), "activation_checkpointing", raising=False)
        vars(training).pop("activation_checkpointing", None)
        training.gradient_checkpointing = True
        assert given.workload(training, 8).checkpointing

    def test_world_that_does_not_divide_the_batch(self):
        given, training = arguments("llama3_8b", "--dry-run", "--world-size", "3")
        with pytest.raises(ValueError, match="multiple of 12"):
            dry_run(config_of("llama3_8b"), given, training)


@pytest.fixture
def launched(tmp_path, monkeypatch, capsys):
    """Launch a recipe's smoke run, which ends before data and model; returns the line it says."""
    for made in ("load_data", "build_model"):
        monkeypatch.setattr(f"metis_hf.lab.recipe.{made}", pytest.fail)

    def launch(name, *argv):
        command = [name, "--smoke", "--output_dir", str(tmp_path), *argv]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / "recipes" / f"{name}.py"), run_name="__main__")
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return said

    return launch


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--scheme", "metsi"], "scheme 'metsi' is not registered; did you mean 'metis'?"),
        (["--metis", '{"rank": 60}'], "rank=60 keeps"),
        (["--metis", "{"], "is not JSON"),
        (["--global_batch", "3"], "multiple of 2"),
        (["--gradient_accumulation_steps", "3"], "contradicts global_batch=4"),
        ([], "has checkpoints (checkpoint-10); go on with --resume"),
        (["--data", "/nope"], "/nope has no meta.json"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_wrong_is_one_line_before_data_and_model_are_made(
    name, argv, message, launched, tmp_path
):
    for step in () if argv else (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert message in launched(name, *argv)


def test_sequences_beyond_the_context_are_one_line(launched):
    said = launched("gpt2_130m", "--sequence_length", "128")
    assert "--sequence_length 128 does not fit the model's context of 64 tokens" in said


def test_a_directory_in_use_is_one_line(launched, tmp_path):
    with hold_directory(tmp_path):
        said = launched("gpt2_130m")
    assert f"{tmp_path} is in use by process" in said
    assert "choose another --output_dir" in said


def test_a_dry_run_needs_no_data():
    """It is asked for on a laptop what a cluster has."""
    given, _ = arguments("gpt2_130m", "--dry_run", "--data", "/nope")
    assert given.data == "/nope"


def test_a_failure_of_the_training_keeps_its_traceback():
    with pytest.raises(SystemExit), one_line_errors():
        raise NotImplementedError("no fp64")
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("a fault of the program")


def test_help_of_fine_tuning_has_the_learning_rate_that_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune_nvfp4", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "recipes" / "finetune_nvfp4.py"), run_name="__main__")
    said = " ".join(capsys.readouterr().out.split())
    assert "initial learning rate for the optimizer. (default: 1e-05)" in said


def test_fine_tuning_says_what_is_wrong_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune_nvfp4", "--use_cpu"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "recipes" / "finetune_nvfp4.py"), run_name="__main__")
    assert capsys.readouterr().err.startswith("error: no model: give a directory")
