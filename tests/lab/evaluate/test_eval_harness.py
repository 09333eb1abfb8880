"""The model that lm-eval knows as `metis`: by name, by entry point, by the wrapper."""

from __future__ import annotations

import json
import os
from importlib.metadata import EntryPoint

import pytest
import torch
from forked import python
from paths import ROOT

from lab.evaluate.eval_tools import DATA, results, run, save
from metis_hf import metis_layers
from metis_hf.lab.evaluate.tasks import plan_tasks, task_manager


@pytest.fixture(scope="module")
def metis_lm():
    """The class; lm-eval takes seconds to import."""
    from metis_hf.lab.evaluate.harness import MetisLM

    return MetisLM


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    return save(tmp_path_factory.mktemp("run") / "model", "metis", tokenizer)


def test_registered_under_its_name(metis_lm):
    from lm_eval.api.registry import get_model

    assert get_model("metis") is metis_lm
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."lm_eval.models"]\n')[1]
    name, value = section.splitlines()[0].split(" = ")
    assert EntryPoint(name, value.strip('"'), "lm_eval.models").load() is metis_lm


def harness_alone(checkpoint, precision, *names):
    """Return lm-eval's own answer for these tasks in one call, the checkpoint named as a run."""
    import lm_eval

    tasks = [task.spec for task in plan_tasks(names, DATA)]
    return lm_eval.simple_evaluate(
        "metis",
        model_args=f"pretrained={checkpoint.parent},precision={precision}",
        tasks=tasks,
        task_manager=task_manager(tasks, None),
        batch_size=8,
        device="cpu",
        bootstrap_iters=10,
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["scheme", "dense"])
def test_same_numbers_as_the_command(precision, checkpoint, tmp_path):
    metrics = {"piqa": "acc,none", "lambada_openai": "perplexity,none"}
    done = run(checkpoint, "--precision", precision, "--tasks", ",".join(metrics),
               "--tasks-dir", DATA, "--batch", 8, "--out", tmp_path)  # fmt: skip
    assert done.exit_code == 0, done.output
    for task, metric in metrics.items():
        raw = harness_alone(checkpoint, precision, task)
        (row,) = results(tmp_path).values()
        ours = row[task]["results"][task][metric]
        assert ours == pytest.approx(raw["results"][task][metric], rel=1e-6)
        likelihoods = {sample["resps"][0][0][0] for sample in raw["samples"][task]}
        assert len(likelihoods) == 4
    both = harness_alone(checkpoint, precision, *metrics)["results"]["lambada_openai"]
    alike = both["perplexity,none"] == pytest.approx(ours, rel=1e-6)
    assert alike == (precision == "dense")  # in one call tasks share batches, and batches matter


def test_precision_decides_the_model(checkpoint, metis_lm):
    def model(**changes):
        return metis_lm(str(checkpoint), device="cpu", **changes).model

    assert len(list(metis_layers(model()))) == 7
    assert not list(metis_layers(model(precision="dense")))
    assert model(dtype="bfloat16").dtype == torch.bfloat16


def test_refusals(checkpoint, metis_lm, tmp_path):
    with pytest.raises(ValueError, match="precision='both'; expected one of scheme, dense"):
        metis_lm(str(checkpoint), precision="both")
    with pytest.raises(ValueError, match="contains no checkpoint"):
        metis_lm(str(tmp_path), device="cpu")


@pytest.mark.slow  # lm-eval indexes all of its tasks
def test_wrapper_is_lm_evals_own_command_line(checkpoint, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "one two three"}\n')
    (tmp_path / "own_text.yaml").write_text(
        "task: own_text\ndataset_path: json\noutput_type: loglikelihood_rolling\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/text.jsonl}}}}\ntest_split: test\n"
        "doc_to_text: ''\ndoc_to_target: text\nmetric_list: [{metric: bits_per_byte}]\n"
    )
    arguments = ["--model", "metis", "--model_args", f"pretrained={checkpoint},precision=dense"]
    arguments += ["--tasks", "own_text", "--include_path", str(tmp_path), "--device", "cpu"]
    arguments += ["--output_path", str(tmp_path / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    printed = python("-m", "metis_hf.lab.evaluate", *arguments, env=environment, cwd=tmp_path)
    assert "own_text" in printed
    (file,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["own_text"]["bits_per_byte,none"] > 0
