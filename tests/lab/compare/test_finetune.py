"""Fine-tuning for deployment: every method from a tiny model to an export that others read."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from paths import ROOT
from peft import PeftModel

from lab.compare.finetune_tools import finetuning
from metis_hf.deploy.packed import load_packed
from metis_hf.lab.finetune.measure import HeldOut, Measured
from metis_hf.lab.finetune.report import (
    Outcome,
    describe,
    different_code,
    markdown_tables,
    rows_of,
)
from metis_hf.lab.finetune.run import LEARNING_RATE, Finetuning
from metis_hf.lab.finetune.smoke import smoke_model


def recipe(*arguments, seconds=600):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "recipes/finetune_nvfp4.py", *arguments],
        capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=environment,
    )  # fmt: skip


def test_smoke_reads_the_data_that_are_given(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.jsonl").write_text("no JSON\n")
    given = [
        "--smoke",
        "--data",
        str(tmp_path / "mine.jsonl"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(sys, "argv", ["finetune_nvfp4.py", *given, "--dry-run"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "recipes/finetune_nvfp4.py"), run_name="__main__")
    assert "mine.jsonl" in capsys.readouterr().err


def test_another_process_has_written_the_smoke_model(tmp_path):
    paths = smoke_model(tmp_path / "out", write=False)
    assert not (tmp_path / "out").exists()
    assert paths == smoke_model(tmp_path / "out", documents=2)
    assert all(Path(path).exists() for path in paths)


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
        found = outcome["texts"]["held-out"]
        assert found["exported"] == pytest.approx(found["loss"], abs=0.02)
    for method in ("ptq", "qat", "qad"):
        config = json.loads((tmp_path / f"export/{method}/config.json").read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        assert group["input_activations"]["num_bits"] == 4
    assert (tmp_path / "export/lora/adapter_model.safetensors").is_file()
    assert (tmp_path / "table.md").read_text().count("\n") == 7


def test_exports_lie_in_the_directory_that_was_given(source, tmp_path):
    run = finetuning(source, tmp_path / "out", method="ptq", export=str(tmp_path / "deployed"))
    exact, ptq = (each.texts["held-out"] for each in run.run(report=lambda line: None))
    assert ptq.loss > exact.loss
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "deployed/ptq", dtype=torch.bfloat16
    )
    found = run.held_out.measure(model)["held-out"]
    assert found.loss == pytest.approx(ptq.exported, abs=1e-6)
    assert ptq.exported == pytest.approx(ptq.loss, abs=0.02)
    assert (tmp_path / "deployed/ptq/tokenizer.json").is_file()
    config = json.loads((tmp_path / "deployed/ptq/config.json").read_text())
    assert config["use_cache"] is True  # as of the model, and off in training


def test_what_is_finished_is_kept(source, tmp_path):
    exact, ptq = finetuning(source, tmp_path, method="ptq").run(report=lambda line: None)
    said = []
    again = finetuning(source, tmp_path, method="qat").run(report=said.append)
    assert again[:2] == [exact, ptq]
    assert [outcome.method for outcome in again] == ["exact", "ptq", "qat"]
    where = f"exported to {tmp_path / 'export/ptq'}"
    assert said == ["exact: finished before", f"ptq: finished before, {where}", "qat ..."]
    assert again[0].code == again[2].code
    with pytest.raises(ValueError, match="temperature"):
        finetuning(source, tmp_path, temperature=2.0).run()
    (tmp_path / "other/qad").mkdir(parents=True)
    (tmp_path / "other/qad/mine").touch()
    with pytest.raises(ValueError, match="qad exists already, and qad would be exported there"):
        finetuning(source, tmp_path, method="qad", export=str(tmp_path / "other")).run()


def test_goes_on_after_an_export_that_was_not_measured(source, tmp_path, monkeypatch):
    """As if its process had ended: the same command exports again, and removes nothing else."""

    def end(*_):
        raise KeyboardInterrupt

    run = finetuning(source, tmp_path, method="ptq")
    run.finished["exact"] = Outcome("exact", {"held-out": Measured(2.0)})
    run._write(run._outcomes())
    monkeypatch.setattr(HeldOut, "measure", end)
    with pytest.raises(KeyboardInterrupt):
        run.run(report=lambda line: None)
    assert (tmp_path / "export/ptq/config.json").is_file()
    (tmp_path / "other/ptq").mkdir(parents=True)
    (tmp_path / "other/ptq/mine").touch()
    with pytest.raises(ValueError, match="ptq exists already"):
        finetuning(source, tmp_path, method="ptq", export=str(tmp_path / "other")).run()
    monkeypatch.setattr(HeldOut, "measure", lambda *_: {"held-out": Measured(2.1)})
    mine = tmp_path / "export/ptq/mine"
    mine.touch()  # somebody has use for it
    with pytest.raises(ValueError, match="ptq exists already"):
        finetuning(source, tmp_path, method="ptq").run()
    mine.unlink()
    run._note_export("ptq")
    _, ptq = finetuning(source, tmp_path, method="ptq").run(report=lambda line: None)
    assert Path(ptq.directory, "config.json").is_file()


@pytest.mark.slow
def test_distillation_nears_the_exact_model(source, tmp_path):
    run = finetuning(source, tmp_path, method="qad", layout="modelopt")
    run.training.max_steps, run.training.learning_rate = 12, 3e-4
    before = run.quantized()
    exact = run.load()
    rows = run.held_out.texts["held-out"]

    def divergence(model):
        with torch.no_grad():
            logs = [m(input_ids=rows).logits.log_softmax(-1) for m in (exact, model)]
        return torch.nn.functional.kl_div(*reversed(logs), log_target=True, reduction="batchmean")

    first = divergence(before.eval())
    assert run.held_out.measure(before, exact)["held-out"].kl == pytest.approx(
        first.item() * len(rows) / rows[:, 1:].numel(), rel=0.1
    )
    _, ptq, qad = (each.texts["held-out"] for each in run.run(report=lambda line: None))
    assert qad.kl < ptq.kl
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qad/model")
    assert divergence(trained.eval()) < first
    described = json.loads((tmp_path / "export/qad/hf_quant_config.json").read_text())
    assert described["quantization"]["quant_algo"] == "NVFP4"


@pytest.mark.slow
def test_several_texts_and_schemes_to_compare_with(source, tmp_path):
    """Each text is measured by itself, with all of --data to train on."""
    lines = Path(source[1]).read_text().splitlines(keepends=True)
    for name, part in (("first", lines[:8]), ("last", lines[-8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    files = f"{tmp_path}/first.jsonl, {tmp_path}/last.jsonl"
    options = {"method": "ptq", "held_out": files, "compare": "nvfp4-rne,metis"}
    run = finetuning(source, tmp_path / "out", **options)
    assert len(run.train) > len(finetuning(source, tmp_path / "other").train)
    outcomes = run.run(report=lambda line: None)
    assert [each.method for each in outcomes] == ["exact", "ptq", "nvfp4-rne", "metis"]
    for outcome in outcomes:
        assert list(outcome.texts) == ["first", "last"]
    exact, ptq, plain, metis = outcomes
    rows = run.held_out.texts["last"]
    with torch.no_grad():
        model = run.load()
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    assert exact.texts["last"].loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert exact.texts["first"].loss != exact.texts["last"].loss
    for name in ("first", "last"):
        assert metis.texts[name].kl < plain.texts[name].kl
        assert ptq.texts[name].exported is not None
        assert plain.texts[name].exported is None
    table = (tmp_path / "out/table.md").read_text()
    assert table.index("**first**") < table.index("**last**")
    record = json.loads((tmp_path / "out/results.json").read_text())
    assert record["held_out_tokens"] == {"first": 4 * 63, "last": 4 * 63}
    again = finetuning(source, tmp_path / "out", **options).run(report=lambda line: None)
    assert again == outcomes


def test_adapters_are_measured_as_they_are_saved(source, tmp_path):
    run = finetuning(source, tmp_path, method="lora")
    *_, lora = run.run(report=lambda line: None)
    base = load_packed(tmp_path / "export/ptq", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "export/lora")
    assert run.held_out.measure(model)["held-out"].loss == lora.texts["held-out"].loss
    assert lora.texts["held-out"].loss != run.finished["ptq"].texts["held-out"].loss
    assert lora.trained > 0


def test_adapters_find_packed_weights_that_an_earlier_command_exported(source, tmp_path):
    """Their own export goes to another place; without the packed weights the error names them."""
    silent = {"report": lambda line: None}
    finetuning(source, tmp_path / "out", method="ptq", export=str(tmp_path / "a")).run(**silent)
    options = {"method": "lora", "export": str(tmp_path / "b")}
    os.rename(tmp_path / "a", tmp_path / "away")
    with pytest.raises(ValueError, match=r"packed weights of ptq, .*/a/ptq: nothing is there now"):
        finetuning(source, tmp_path / "out", **options).run(**silent)
    os.rename(tmp_path / "away", tmp_path / "a")
    *_, lora = finetuning(source, tmp_path / "out", **options).run(**silent)
    assert lora.directory == str(tmp_path / "b/lora")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["lora"]


def outcomes(ptq, qad):
    return [
        Outcome("exact", {"a": Measured(2.0)}),
        Outcome("ptq", {"a": Measured(ptq, 0.3, ptq + 0.01)}, directory="a"),
        Outcome("qad", {"a": Measured(qad, 0.1)}, trained=1000, steps=7, directory="b"),
    ]


def test_a_step_beyond_the_first_epoch_has_a_whole_batch(source, tmp_path):
    run = finetuning(source, tmp_path)
    seen = []

    class Trained:
        accelerator = types.SimpleNamespace(unwrap_model=lambda *_, **__: None)
        model_wrapped = None

        def __init__(self, train_dataset, **_):
            seen.append(len(train_dataset))

        def train(self):
            pass

    for count in (10, 12):
        run.train = run.train[:1].repeat(count, 1)
        run._fit(Trained, "qat", None)
    assert seen == [8, 12]  # 3 steps of 4


def test_the_table_says_how_much_was_recovered():
    rows = rows_of([outcomes(2.2, 2.05)], "a")
    assert rows[0] == ("exact", "", "", "2.0000", "", "", "", "")
    assert rows[1] == ("ptq", "", "", "2.2000", "+10.00", "", "0.3000", "2.2100")
    assert rows[2] == ("qad", "1,000", "7", "2.0500", "+2.50", "75", "0.1000", "")


def test_the_table_of_two_seeds_has_intervals_where_they_differ():
    """Half of 95 % at one degree of freedom: 12.706 times a standard deviation over sqrt(2)."""
    rows = rows_of([outcomes(2.2, 2.05), outcomes(2.2, 2.03)], "a")
    assert rows[1] == ("ptq", "", "", "2.2000", "+10.00", "", "0.3000", "2.2100")
    assert rows[2][3:6] == ("2.0400 ± 0.1271", "+2.00 ± 6.35", "80 ± 64")
    assert "| qad | 1,000 | 7 |" in markdown_tables(outcomes(2.2, 2.05), outcomes(2.2, 2.05)[:2])


def test_methods_of_different_code_are_named():
    exact, ptq, qad = outcomes(2.2, 2.05)
    assert different_code([exact, replace(ptq, code="a"), replace(qad, code="a")]) == []
    (said,) = different_code([replace(exact, code="b"), replace(ptq, code="a"), qad])
    assert said.startswith("Methods of different code or torch")
    assert said.endswith(" b: exact; a: ptq.")


def test_a_learning_rate_of_zero_is_the_default(source, tmp_path):
    """The same settings: a directory of one goes on with the other."""
    for rate in (0.0, LEARNING_RATE):
        run = finetuning(source, tmp_path)
        run.training.learning_rate = rate
        run._claim()


def test_a_model_trained_under_autocast_is_measured_in_fp32(source, tmp_path):
    run = finetuning(source, tmp_path, bf16=True)
    model = run.load()
    ids = run.train[:2]
    run._fit(transformers.Trainer, "plain", model)
    assert model(ids).logits.dtype is torch.float32
    seen = set()
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    linear.register_forward_hook(lambda layer, args, y: seen.add(y.dtype))
    model(ids)
    assert seen == {torch.float32}


def test_the_plan_counts_the_export(source, tmp_path):
    run = finetuning(source, tmp_path, method="qat,qad,lora")
    said = run.arguments, len(run.train), run.held_out.tokens, run.steps
    text = describe(*said, bf16=False)
    packed = 2 * (4 * 64 * 64 + 3 * 64 * 96)
    assert f"{packed:,} of them packed" in text
    assert "3 steps, 768 tokens" in text
    assert "on 252 tokens of held-out" in text
    plain = 2 * 512 * 64 + 5 * 64  # embeddings, head and norms
    for bf16, size in ((False, 4), (True, 2)):
        text = describe(*said, bf16=bf16)
        teacher, base = size * (plain + packed), packed * 4.5 / 8 + size * plain
        assert f"{teacher / 2**20:,.0f} MiB for qad's teacher" in text
        assert f"{base / 2**20:,.0f} MiB for the packed base of lora" in text
    for method in ("qat", "qad's teacher", "lora"):
        assert method in text


def test_each_method_begins_with_the_seed(source, tmp_path, monkeypatch):
    """Whatever ran before it: adapters are drawn before Trainer sets the seed."""
    monkeypatch.setattr(Finetuning, "_lora", lambda _: torch.rand(1).item())
    run = finetuning(source, tmp_path)
    first = run._outcome("lora")
    torch.rand(3)
    assert run._outcome("lora") == first
