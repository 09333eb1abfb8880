"""Comparisons that continue from a checkpoint: its weights, its tokenizer, any text."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import llama
from tensors import assert_same
from texts import documents

from lab.compare.comparing import fake_launcher, run
from metis_hf import MetisConfig, get_metis_model
from metis_hf.cli.main import main
from metis_hf.data import corpus
from metis_hf.data.corpus import train_tokenizer
from metis_hf.lab.compare import command as commands
from metis_hf.lab.compare.command import compare_schemes
from metis_hf.lab.compare.data import embed, load_data
from metis_hf.lab.compare.plan import make_plan
from metis_hf.lab.compare.training import initial_model

pytestmark = pytest.mark.usefixtures("no_pictures")

VOCAB, LENGTH = 300, 32


def small_model(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "max_position_embeddings": 2048}
    return llama(1, **{**sizes, "rope_theta": 777.0, **changes})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a checkpoint and chunked tokens of its tokenizer."""
    folder = tmp_path_factory.mktemp("continued")
    few = list(documents()[:100])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "stdlib_documents", lambda: few)
        embed(folder / "data", vocab_size=VOCAB, sequence_length=LENGTH)
    small_model().save_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "data/tokenizer")
    tokenizer.save_pretrained(folder / "model")
    return folder


def plan(place, **options):
    given = {"checkpoint": str(place / "model"), "data": str(place / "data"), **options}
    return make_plan(**given)


@pytest.mark.slow
def test_every_run_starts_from_its_weights(place):
    experiment = plan(place).experiment
    made = initial_model(experiment, torch.device("cpu"))
    assert_same(made, small_model())
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    # The config alone makes the same model, for what is counted without weights.
    config = transformers.AutoConfig.for_model(**experiment.model)
    assert config.rope_parameters == made.config.rope_parameters
    assert (config.vocab_size, config.hidden_size) == (VOCAB, 32)


def test_the_training_is_that_of_a_checkpoint(place):
    found = plan(place, tokens=64_000, training={"learning_rate": 3e-5})
    assert found.size == "checkpoint"
    assert found.experiment.training["learning_rate"] == 3e-5
    assert found.experiment.steps == round(64_000 / (8 * 256))
    assert found.settings()["experiment"]["checkpoint"] == str(place / "model")
    assert "checkpoint" not in make_plan().settings()["experiment"]


def test_what_is_refused(place, tmp_path):
    def refused(match, **options):
        with pytest.raises(ValueError, match=match):
            plan(place, **options)

    for other in ({"size": "tiny"}, {"model": {"hidden_size": 64}}):
        refused("already defines the model; leave size and model out", **other)
    refused(r"has no config\.json; give a directory", checkpoint=str(place / "nowhere"))
    refused("a checkpoint needs data: give --data DIR", data=None)
    small_model(vocab_size=400).save_pretrained(tmp_path)
    train_tokenizer(documents()[:3], vocab_size=400).save_pretrained(tmp_path)
    refused("come from another vocabulary than", checkpoint=str(tmp_path))
    get_metis_model(small_model(), MetisConfig()).save_pretrained(tmp_path / "quantized")
    refused("is quantized; start from its dense", checkpoint=str(tmp_path / "quantized"))


@pytest.mark.parametrize("changed", ["model", "data"])
def test_a_changed_checkpoint_or_text_is_refused(changed, place, tmp_path):
    """Its path is the same; results of either would stand side by side."""
    for name in ("model", "data"):
        shutil.copytree(place / name, tmp_path / name)
    options = {
        "checkpoint": str(tmp_path / "model"), "data": str(tmp_path / "data"),
        "sequence_length": LENGTH, "seeds": [0], "schemes": ["bf16"],
    }  # fmt: skip
    launcher = fake_launcher(tmp_path, **options)
    assert compare_schemes(options, tmp_path / "out", launcher=launcher) == []
    assert compare_schemes(options, tmp_path / "out", launcher=launcher) == []
    file = {"model": "model.safetensors", "data": "tokenizer/tokenizer.json"}[changed]
    content = bytearray((tmp_path / changed / file).read_bytes())
    content[-5] ^= 1 if changed == "model" else 0
    (tmp_path / changed / file).write_bytes(content + b"\n" * (changed == "data"))
    message = rf"{changed} changed after .*out was started.*another --out"
    with pytest.raises(ValueError, match=message):
        compare_schemes(options, tmp_path / "out", launcher=launcher)


def test_data_of_another_comparison_are_checked(place):
    experiment = plan(place, sequence_length=LENGTH).experiment
    load_data(place / "data", None, experiment, 4)
    for validation, changes, message in (
        (None, {"sequence_length": 64}, "contains sequences of 32 tokens, but the experiment uses"),
        (
            None,
            {"model": {"vocab_size": 200}},
            r"contains token id 2\d\d, but the model has a vocabulary of 200",
        ),
        ("elsewhere", {}, "validation=elsewhere conflicts with .*; leave --validation"),
    ):
        with pytest.raises(ValueError, match=message):
            load_data(place / "data", validation, replace(experiment, **changes), 4)


@pytest.mark.slow
def test_continued_training_on_the_command_line(place, tmp_path):
    """The loss at the first step is the checkpoint's, whatever the seed."""
    config = tmp_path / "compare.yaml"
    config.write_text(
        f"sequence_length: {LENGTH}\nglobal_batch: 4\neval_sequences: 8\n"
        "training: {max_steps: 3, learning_rate: 0.001}\n"
    )
    done = run(
        "--model", place / "model", "--data", place / "data", "--config", config,
        "--schemes", "bf16,metis", "--seeds", "0,1", "--out", tmp_path / "out", "--times",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/compare.json").read_text())
    curves = {(r["scheme"], r["seed"]): r["curve"]["loss"] for r in record["runs"]}
    assert curves["bf16", 0][0] == pytest.approx(curves["bf16", 1][0], rel=0.05)
    assert curves["bf16", 0] != curves["metis", 0]
    assert "llama with" in (tmp_path / "out/table.md").read_text()


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        ("size: 130m", [], "compare-custom-130m"),
        ("preset: rank\ncheckpoint: {model}", [], "compare-rank-model"),
        ("preset: rank", ["--model", "{model}"], "compare-rank-model"),
    ],
)
def test_the_directory_is_named_after_what_is_trained(
    text, args, expected, place, tmp_path, monkeypatch
):
    """Whether a file or the command line says it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(text.format(model=place / "model"))
    asked = []
    monkeypatch.setattr(
        commands, "compare_schemes", lambda options, out, **_: asked.append(out) or []
    )
    given = [arg.format(model=place / "model") for arg in args]
    command = ["compare", "--config", "plan.yaml", "--data", str(place / "data"), *given]
    monkeypatch.setattr(sys, "argv", ["metis-hf", *command])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert asked == [Path("runs", expected)]
