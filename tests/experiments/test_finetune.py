"""Fine-tuning for deployment: every method from a tiny model to an export that others read."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from paths import ROOT
from transformers import TrainingArguments

from metis_hf.experiments.finetune.arguments import FinetuneArguments
from metis_hf.experiments.finetune.report import Outcome, describe, rows_of
from metis_hf.experiments.finetune.run import Finetuning
from metis_hf.experiments.finetune.smoke import smoke_model


def recipe(*arguments, seconds=600):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "recipes/finetune_nvfp4.py", *arguments],
        capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return smoke_model(tmp_path_factory.mktemp("source"))


def finetuning(source, out, **options):
    model, data = source
    values = {
        "model": model, "data": data, "sequence_length": 64, "eval_sequences": 4,
        "calibration_sequences": 4, "global_batch": 4, **options,
    }  # fmt: skip
    training = TrainingArguments(
        str(out), max_steps=3, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        learning_rate=1e-3, save_strategy="no", report_to=[], use_cpu=True,
    )  # fmt: skip
    return Finetuning(FinetuneArguments(**values), training)


@pytest.mark.slow
def test_smoke(tmp_path):
    """The recipe as a person launches it: all methods, exports that transformers reads, a table."""
    done = recipe("--smoke", "--output_dir", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "results.json").read_text())
    names = [outcome["method"] for outcome in record["outcomes"]]
    assert names == ["exact", "ptq", "qat", "qad", "lora"]
    for name in names[1:]:
        assert name in done.stdout
    for outcome in record["outcomes"][1:4]:
        assert outcome["exported"] == pytest.approx(outcome["loss"], abs=0.02)
    for method in ("ptq", "qat", "qad"):
        config = json.loads((tmp_path / f"export/{method}/config.json").read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        assert group["input_activations"]["num_bits"] == 4
    assert (tmp_path / "export/lora/adapter_model.safetensors").is_file()
    assert (tmp_path / "table.md").read_text().count("\n") == 7


def test_exports_lie_in_the_directory_that_was_given(source, tmp_path):
    run = finetuning(source, tmp_path / "out", method="ptq", export=str(tmp_path / "deployed"))
    exact, ptq = run.run(report=lambda line: None)
    assert ptq.loss > exact.loss
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "deployed/ptq", dtype=torch.bfloat16
    )
    assert run.loss(model) == pytest.approx(ptq.exported, abs=1e-6)
    assert ptq.exported == pytest.approx(ptq.loss, abs=0.02)
    assert (tmp_path / "deployed/ptq/tokenizer.json").is_file()


def test_what_is_finished_is_kept(source, tmp_path):
    exact, ptq = finetuning(source, tmp_path, method="ptq").run(report=lambda line: None)
    said = []
    again = finetuning(source, tmp_path, method="qat").run(report=said.append)
    assert again[:2] == [exact, ptq]
    assert [outcome.method for outcome in again] == ["exact", "ptq", "qat"]
    assert said == ["ptq: finished before", "qat ..."]
    with pytest.raises(ValueError, match="temperature"):
        finetuning(source, tmp_path, temperature=2.0)
    (tmp_path / "other/qad").mkdir(parents=True)
    (tmp_path / "other/qad/mine").touch()
    with pytest.raises(ValueError, match="qad exists already, and qad would be exported there"):
        finetuning(source, tmp_path, method="qad", export=str(tmp_path / "other"))


def test_distillation_nears_the_exact_model(source, tmp_path):
    run = finetuning(source, tmp_path, method="qad", layout="modelopt")
    run.training.max_steps, run.training.learning_rate = 12, 3e-4
    before = run.quantized()
    exact = run.load()

    def divergence(model):
        with torch.no_grad():
            logs = [m(input_ids=run.held_out).logits.log_softmax(-1) for m in (exact, model)]
        return torch.nn.functional.kl_div(*reversed(logs), log_target=True, reduction="batchmean")

    first = divergence(before.eval())
    assert run.measure(before, exact)[1] == pytest.approx(
        first.item() * len(run.held_out) / run.held_out[:, 1:].numel(), rel=0.1
    )
    outcomes = run.run(report=lambda line: None)
    assert outcomes[2].kl < outcomes[1].kl
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qad/model")
    assert divergence(trained.eval()) < first
    described = json.loads((tmp_path / "export/qad/hf_quant_config.json").read_text())
    assert described["quantization"]["quant_algo"] == "NVFP4"


def test_the_table_says_how_much_was_recovered():
    rows = rows_of(
        [
            Outcome("exact", 2.0),
            Outcome("ptq", 2.2, 0.3, 2.21, directory="a"),
            Outcome("qad", 2.05, 0.1, trained=1000, steps=7, directory="b"),
        ]
    )
    assert rows[0] == ("exact", "", "", "2.0000", "", "", "", "")
    assert rows[1] == ("ptq", "", "", "2.2000", "+10.00", "", "0.3000", "2.2100")
    assert rows[2] == ("qad", "1,000", "7", "2.0500", "+2.50", "75", "0.1000", "")


def test_the_plan_counts_the_export(source, tmp_path):
    run = finetuning(source, tmp_path, method="qat,qad,lora")
    text = describe(run.arguments, len(run.train), len(run.held_out), run.steps)
    packed = 2 * (4 * 64 * 64 + 3 * 64 * 96)
    assert f"{packed:,} of them packed" in text
    assert "3 steps, 768 tokens" in text
    for method in ("qat", "qad's teacher", "lora"):
        assert method in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gptq"}, "--method 'gptq'; choose of ptq, qat, qad, lora"),
        ({"scheme": "metis"}, "--scheme 'metis'; choose of w4a4, w4a16"),
        ({"layout": "gguf"}, "--layout 'gguf'; choose of compressed-tensors, modelopt"),
        ({"eval_sequences": 0}, "--eval_sequences 0; expected at least 1"),
        ({"global_batch": 3}, "--global_batch 3 is no multiple of 2"),
        ({"data": None}, "no data: give --data FILE"),
        ({"model": ""}, "no model: give a directory or hub name, or try --smoke"),
        ({"sequence_length": 10**6}, "held-out sequences of 1000000"),
    ],
)
def test_bad_input(options, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetuning(source, tmp_path, **options)
