"""A scheme from a user's file goes through everything: conversion, training, every command."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import torch
import transformers
from conftest import VOCAB, llama
from lab.compare.comparing import METIS_HF, write_config
from paths import ROOT
from typer.testing import CliRunner

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.cli.main import app
from metis_hf.data.corpus import stdlib_documents, train_tokenizer
from metis_hf.lab.checkpoint import Checkpoint
from metis_hf.lab.compare.tasks import Task
from metis_hf.lab.compare.variants import Variant
from metis_hf.lab.evaluate.harness import MetisLM
from metis_hf.lab.evaluate.jobs import own_schemes
from metis_hf.schemes import import_schemes, registry, scheme_info, source_digests

NAME = "two-nearest"
SCHEME = f"""
from metis_hf import register_scheme
from metis_hf.operands import Operand
from metis_hf.schemes import Scheme
from metis_hf.schemes.parts import quantizer


@register_scheme("{NAME}", summary="weights and inputs in NVFP4, nearest", source="a test")
def build(config, rank):
    nearest = quantizer(config, rounding="nearest", scale_rounding="nearest")
    return Scheme(fprop_input=Operand(nearest), fprop_weight=Operand(nearest))
"""
LOSS = ("--tasks", "none", "--text")


def metis_hf(*arguments):
    """Run `metis-hf ...` in this process, where the file may be imported already."""
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "100"})


@pytest.fixture(scope="module", autouse=True)
def as_before():
    """Take the schemes of these tests out again: other files' tests go through all there are."""
    before = dict(registry.SCHEMES)
    yield
    registry.SCHEMES.clear()
    registry.SCHEMES.update(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: the scheme, and a model that was converted to it, trained and saved."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(SCHEME)
    assert import_schemes(str(folder / "mine.py")) == [NAME]
    train_tokenizer(stdlib_documents()[:3], vocab_size=VOCAB + 1).save_pretrained(folder / "model")
    config = llama().config
    config.vocab_size = VOCAB + 1
    model = get_metis_model(transformers.LlamaForCausalLM(config), MetisConfig(scheme=NAME))
    ids = torch.arange(64).view(2, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        torch.save(model.eval()(input_ids=ids).logits, folder / "logits.pt")
    (folder / "text.txt").write_text("The clock in the hall struck nine. " * 40)
    return folder


def test_reloaded_as_it_was_saved(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert {layer.config.scheme for _, layer in metis_layers(model)} == {NAME}
    with torch.no_grad():
        found = model(input_ids=torch.arange(64).view(2, 32)).logits
    assert torch.equal(found, torch.load(folder / "logits.pt"))


def test_unknown_scheme_of_a_checkpoint_says_how_to_import_it(folder, monkeypatch):
    monkeypatch.delitem(registry.SCHEMES, NAME)
    message = rf"scheme '{NAME}' is not registered.* --import .*import_schemes"
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    done = metis_hf("eval", folder / "model", *LOSS, folder / "text.txt")
    assert isinstance(done.exception, ValueError)
    assert re.search(message, str(done.exception))


def test_schemes_lists_it(folder):
    done = metis_hf("schemes", NAME, "--json", "--import", folder / "mine.py")
    assert done.exit_code == 0, done.output
    (record,) = json.loads(done.stdout)
    assert (record["name"], record["source"]) == (NAME, "a test")
    assert record["operands"]["fprop.weight"]["format"] == "nvfp4"
    refused = metis_hf("schemes", NAME, "--import", folder / "other.py")
    assert isinstance(refused.exception, ValueError)
    assert "other.py" in str(refused.exception)


def test_eval_and_export(folder):
    given = (folder / "model", "--import", folder / "mine.py")
    done = metis_hf("eval", *given, *LOSS, folder / "text.txt", "--out", folder / "eval")
    assert done.exit_code == 0, done.output
    (file,) = (folder / "eval/results").rglob("results_*.json")
    settings = json.loads(file.read_text())["metis"]["settings"]
    assert settings["own_schemes"] == source_digests([NAME])
    done = metis_hf("export", *given, "--out", folder / "packed", "--format", "compressed-tensors")
    assert done.exit_code == 0, done.output
    assert "14 layers in NVFP4" in done.stdout


@pytest.mark.usefixtures("folder")  # which registers the scheme
def test_a_changed_file_is_noticed_wherever_it_is_used(tmp_path):
    """By a comparison, fidelity and eval: in all layers, in some, in attention."""
    digests = source_digests([NAME])
    assert digests.keys() == {NAME}
    for config in (
        {"scheme": NAME},
        {"scheme": "nvfp4", "scheme_pattern": {"down_proj": NAME}},
        {"scheme": "nvfp4", "attention": NAME},
    ):
        assert source_digests(MetisConfig(**config).schemes) == digests
        assert Task(Variant("mine", config), 0, tmp_path).sources == digests
        checkpoint = Checkpoint(tmp_path, "mine", MetisConfig(**config).to_dict())
        assert own_schemes(checkpoint) == digests
    assert own_schemes(Checkpoint(tmp_path, "ours", MetisConfig().to_dict())) == {}


def test_lm_eval_wrapper(folder, tmp_path):
    (tmp_path / "of_lm_eval.py").write_text(SCHEME.replace(NAME, "of-lm-eval"))
    with pytest.raises(ValueError, match="'of-lm-eval' is not registered"):
        scheme_info("of-lm-eval")
    MetisLM.create_from_arg_string(
        f"pretrained={folder / 'model'},import={tmp_path / 'of_lm_eval.py'}", {"device": "cpu"}
    )
    assert scheme_info("of-lm-eval").source == "a test"


@pytest.mark.slow
def test_compare_in_real_processes(folder, monkeypatch):
    """Two workers that have not seen the file, and a second start that has to be told of it."""
    few = stdlib_documents()[:200]
    monkeypatch.setattr("metis_hf.data.corpus.stdlib_documents", lambda: few)
    config = write_config(folder, training={"max_steps": 3}, seeds=[0])
    out, file = folder / "out", folder / "mine.py"
    command = ("compare", "--config", config, "--out", out, "--jobs", 1)
    command += ("--schemes", f"bf16,{NAME}")
    done = metis_hf(*command, "--import", file)
    assert done.exit_code == 0, done.output
    lines = (out / "table.md").read_text().splitlines()
    rows = {line.split("|")[1].strip() for line in lines if line.startswith("|")}
    assert {"bf16", NAME} <= rows
    run = out / "runs" / NAME / "seed-0"
    assert json.loads((run / "result.json").read_text())["config"]["scheme"] == NAME
    assert json.loads((run / "run.json").read_text())["imports"] == [str(file)]
    untold = metis_hf(*command)
    assert f"{out} was started with --import {file}." in str(untold.exception)
    command += ("--import", file)
    again = subprocess.run(
        [*METIS_HF, *map(str, command)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    file.write_text(SCHEME + "\n# another scheme by now\n")
    refused = metis_hf(*command)
    file.write_text(SCHEME)
    assert isinstance(refused.exception, ValueError)
    assert f"contains a run of '{NAME}' from before its file changed" in str(refused.exception)
