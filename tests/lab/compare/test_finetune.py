"""recipes/finetune_nvfp4.py: every method from a tiny model to an export that others read."""

from __future__ import annotations

import functools
import json
import math
import os
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from paths import ROOT
from peft import PeftModel
from safetensors.torch import load_file, save_file
from training.trainer_tools import arguments

from lab.compare.comparing import run_recipe
from metis_hf.deploy.packed import load_packed
from metis_hf.lab.finetune_table import (
    Measured,
    Outcome,
    different_code,
    losses,
    markdown_tables,
    rows_of,
)
from metis_hf.shared.locks import hold_directory

RECIPE = str(ROOT / "recipes/finetune_nvfp4.py")


@pytest.fixture(scope="module")
def recipe():
    """The recipe's own functions."""
    return SimpleNamespace(**runpy.run_path(RECIPE))


@pytest.fixture(scope="module")
def source(recipe, tmp_path_factory):
    """Model and data of the smoke run."""
    return recipe.smoke_model(tmp_path_factory.mktemp("source"))


@pytest.fixture
def finetune(recipe, source, tmp_path):
    """A function that runs three steps of the methods into a directory."""

    def finetune(out=tmp_path / "out", bf16=False, training=(), **options):
        model, data = source
        values = {
            "model": model, "data": data, "sequence_length": 64, "eval_sequences": 4,
            "calibration_sequences": 4, "global_batch": 4, **options,
        }  # fmt: skip
        training = {
            "output_dir": str(out), "max_steps": 3, "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2, "learning_rate": 1e-3, "report_to": [],
            "use_cpu": True, "bf16": bf16, "disable_tqdm": True, **dict(training),
        }  # fmt: skip
        return recipe.finetune(
            recipe.Arguments(**values), transformers.TrainingArguments(**training)
        )

    return finetune


main = functools.partial(run_recipe, RECIPE)


@pytest.mark.slow
def test_smoke(recipe, tmp_path, monkeypatch, capsys):
    """All methods, exports that transformers reads, a table; a second run says what there is."""
    main(monkeypatch, "--smoke", "--output_dir", str(tmp_path))
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "results.json").read_text())
    names = [outcome["method"] for outcome in record["outcomes"]]
    assert names == ["exact", "ptq", "qat", "qad", "lora"]
    assert all(name in said for name in names)
    for outcome in record["outcomes"][1:4]:
        found = outcome["texts"]["held-out"]
        assert found["exported"] == pytest.approx(found["loss"], abs=0.02)
        config = json.loads((tmp_path / f"export/{outcome['method']}/config.json").read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        assert group["input_activations"]["num_bits"] == 4
        assert config["use_cache"] is True  # as of the model, and off in training
    assert (tmp_path / "table.md").read_text().count("\n") == 7
    base = load_packed(tmp_path / "export/ptq", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "export/lora")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "smoke-model")
    a = recipe.Arguments(data=str(tmp_path / "smoke.jsonl"), sequence_length=64, eval_sequences=4)
    rows = recipe.load_data(a, tokenizer)[1]["held-out"]
    lora = record["outcomes"][4]
    assert losses(model, rows, 4)[0] == lora["texts"]["held-out"]["loss"]
    assert lora["trained"] > 0
    main(monkeypatch, "--smoke", "--output_dir", str(tmp_path))
    said = capsys.readouterr().out.splitlines()
    assert "exact: already finished" in said
    assert f"ptq: already finished, exported to {tmp_path / 'export/ptq'}" in said


def test_smoke_reads_the_data_that_are_given(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.jsonl").write_text("no JSON\n")
    given = ["--smoke", "--data", str(tmp_path / "mine.jsonl"), "--dry-run"]
    with pytest.raises(SystemExit):
        main(monkeypatch, *given, "--output_dir", str(tmp_path / "out"))
    assert "mine.jsonl" in capsys.readouterr().err


@pytest.mark.slow
def test_distillation_nears_the_exact_model_on_several_texts(recipe, finetune, source, tmp_path):
    """Each text is measured by itself; schemes are there to compare with."""
    lines = Path(source[1]).read_text().splitlines(keepends=True)
    for name, part in (("first", lines[:8]), ("last", lines[-8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    options = {
        "method": "qad", "compare": "nvfp4-rne,metis", "format": "modelopt",
        "held_out": f"{tmp_path}/first.jsonl, {tmp_path}/last.jsonl",
        "training": {"max_steps": 12, "learning_rate": 3e-4},
    }  # fmt: skip
    outcomes = {each.method: each.texts for each in finetune(**options)}
    assert list(outcomes) == ["exact", "ptq", "nvfp4-rne", "metis", "qad"]
    for name in ("first", "last"):
        assert outcomes["qad"][name].kl < outcomes["ptq"][name].kl
        assert outcomes["metis"][name].kl < outcomes["nvfp4-rne"][name].kl
    model = transformers.AutoModelForCausalLM.from_pretrained(source[0], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source[0])
    a = recipe.Arguments(data=source[1], held_out=options["held_out"], sequence_length=64,
                         eval_sequences=4)  # fmt: skip
    rows = recipe.load_data(a, tokenizer)[1]["last"]
    with torch.no_grad():
        wanted = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    assert outcomes["exact"]["last"].loss == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)
    table = (tmp_path / "out/table.md").read_text()
    assert table.index("**first**") < table.index("**last**")
    config = json.loads((tmp_path / "out/export/qad/hf_quant_config.json").read_text())
    assert config["quantization"]["quant_algo"] == "NVFP4"


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(recipe, finetune, tmp_path, monkeypatch):
    """Killed behind the export of ptq, before it was measured: it is exported again."""
    space = recipe.finetune.__globals__

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setitem(space, "load_deployed", kill)
        with pytest.raises(Killed):
            finetune(method="ptq")
    assert (tmp_path / "out/export/ptq/config.json").is_file()
    (tmp_path / "other/ptq").mkdir(parents=True)
    (tmp_path / "other/ptq/mine").touch()
    with pytest.raises(ValueError, match="ptq already exists, and ptq would be exported there"):
        finetune(method="ptq", export=str(tmp_path / "other"))
    exact, ptq = finetune(method="ptq", export=str(tmp_path / "a"))
    assert ptq.texts["held-out"].loss > exact.texts["held-out"].loss
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a/ptq", dtype="bfloat16")
    assert model.config.quantization_config
    # A method is killed in training, and goes on from its checkpoint; the others are finished.
    saving = {"training": {"save_strategy": "steps", "save_steps": 1}, "method": "lora"}
    step, seen = transformers.Trainer.training_step, []

    def killed_in_the_third(self, *given):
        seen.append(self.state.global_step)
        if seen == [0, 0, 1, 1, 2]:  # two batches a step
            raise Killed
        return step(self, *given)

    monkeypatch.setattr(transformers.Trainer, "training_step", killed_in_the_third)
    os.rename(tmp_path / "a", tmp_path / "away")
    with pytest.raises(
        ValueError,
        match=r"packed weights that ptq exported to .*/a/ptq, but .* missing; restore it",
    ):
        finetune(**saving)
    os.rename(tmp_path / "away", tmp_path / "a")
    with pytest.raises(Killed):
        finetune(**saving)
    again = finetune(**saving)
    assert seen == [0, 0, 1, 1, 2, 2, 2]
    assert again[:2] == [exact, ptq]
    assert [outcome.method for outcome in again] == ["exact", "ptq", "lora"]
    assert again[2].directory == str(tmp_path / "out/export/lora")
    with pytest.raises(ValueError, match="temperature"):
        finetune(temperature=2.0)
    with pytest.raises(ValueError, match=r"weight_decay: 0\.0 there, 0\.5 now"):
        finetune(training={"weight_decay": 0.5})
    with (
        hold_directory(tmp_path / "out"),
        pytest.raises(ValueError, match=r"is in use by .* another --output_dir"),
    ):
        finetune(method="ptq")


def test_training_in_bf16_is_measured_in_fp32(recipe, source, tmp_path):
    """Each step has a whole batch, beyond the first epoch too."""
    a = recipe.Arguments(model=source[0], global_batch=4)
    training = arguments(tmp_path, max_steps=3, per_device_train_batch_size=4, bf16=True)
    model, sizes = recipe.load(a, training), []
    rows = torch.zeros(10, 8, dtype=torch.int64)

    class Counting(transformers.Trainer):
        def training_step(self, model, inputs, *rest):
            sizes.append(len(inputs["input_ids"]))
            return super().training_step(model, inputs, *rest)

    recipe.fit(Counting, "plain", model, a, training, rows)
    assert sizes == [4, 4, 4]
    assert model(rows[:2]).logits.dtype is torch.float32


def test_the_dry_run_trains_nothing(finetune, tmp_path, capsys):
    assert finetune(dry_run=True, method="qat,qad,lora") == []
    said = capsys.readouterr().out
    packed, plain = 2 * (4 * 64 * 64 + 3 * 64 * 96), 2 * 512 * 64 + 5 * 64
    for number in (
        f"{packed + plain:,}", f"{packed:,}", "768", "on 252 tokens of held-out", "of all 3 runs",
    ):  # fmt: skip
        assert number in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gptq"}, "--method 'gptq'; choose from ptq, qat, qad, lora"),
        ({"eval_sequences": 0}, "--eval_sequences 0; expected at least 1"),
        ({"tokens": math.inf}, "--tokens inf; expected a finite number above 0"),
        ({"cross_entropy_share": 3.0}, r"--cross_entropy_share 3\.0; expected a share from 0"),
        ({"global_batch": 3}, "a global batch of 3 sequences cannot be split evenly"),
        ({"data": None}, "no data: give --data FILE"),
        ({"model": ""}, "no model: give a directory or a hub name, or try --smoke"),
        ({"compare": "nvfp5"}, "scheme 'nvfp5' is not registered"),
        ({"held_out": "a/x.jsonl,b/x.jsonl"}, "two files have the same name"),
        ({"sequence_length": 2049}, "2049 does not fit in the model's context of 2048 tokens"),
        ({"training": {"num_train_epochs": 2}}, "--tokens sets the length of the run"),
    ],
)
def test_bad_input(options, message, finetune, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetune(**options)
    assert not (tmp_path / "out/results.json").exists()


def test_models_and_data_that_are_refused(finetune, source, tmp_path, monkeypatch):
    model = Path(shutil.copytree(source[0], tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(
        ValueError,
        match=r"produces token \d+, but the model's vocabulary has 300 tokens: they do not",
    ):
        finetune(model=str(model))
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight"):
        finetune(model=str(model), out=tmp_path / "b")
    gpt2 = transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=1, n_head=2)
    gpt2.save_pretrained(tmp_path / "gpt2")  # neither weights nor a tokenizer
    with pytest.raises(ValueError, match=r"c_attn: it is a Conv1D"):
        finetune(model=str(tmp_path / "gpt2"))
    with pytest.raises(ValueError, match=r"is also the file of --data; leave --held-out out"):
        finetune(held_out=str(source[1]))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"FSDP and DeepSpeed shard them.*under DDP"):
        finetune()


def outcomes(ptq, qad):
    return [
        Outcome("exact", {"a": Measured(2.0)}),
        Outcome("ptq", {"a": Measured(ptq, 0.3, ptq + 0.01)}, directory="a"),
        Outcome("qad", {"a": Measured(qad, 0.1)}, trained=1000, steps=7, directory="b"),
    ]


def test_the_table():
    """Of two seeds: half of 95 % at one degree of freedom, 12.706 standard deviations / sqrt(2)."""
    rows = rows_of([outcomes(2.2, 2.05)], "a")
    assert rows[0] == ("exact", "", "", "2.0000", "", "", "", "")
    assert rows[1] == ("ptq", "", "", "2.2000", "+10.00", "", "0.3000", "2.2100")
    assert rows[2] == ("qad", "1,000", "7", "2.0500", "+2.50", "75", "0.1000", "")
    rows = rows_of([outcomes(2.2, 2.05), outcomes(2.2, 2.03)], "a")
    assert rows[1] == ("ptq", "", "", "2.2000", "+10.00", "", "0.3000", "2.2100")
    assert rows[2][3:6] == ("2.0400 ± 0.1271", "+2.00 ± 6.35", "80 ± 64")
    assert "| qad | 1,000 | 7 |" in markdown_tables(outcomes(2.2, 2.05), outcomes(2.2, 2.05)[:2])
    exact, ptq, qad = outcomes(2.2, 2.05)
    assert different_code([exact, replace(ptq, code="a"), replace(qad, code="a")]) == ""
    said = different_code([replace(exact, code="b"), replace(ptq, code="a"), qad])
    assert said.startswith("\nThese methods ran with different code or torch")
    assert said.endswith(" b: exact; a: ptq.\n")
