"""Evaluation of a model in memory: the numbers of direct scoring, and no trace on the caller."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from lab.evaluate.eval_tools import CONTEXT, make_model, scored
from metis_hf.lab.evaluate import EvalResult, evaluate_model, held_out_loss
from metis_hf.lab.evaluate.held_out import LOSS_TASK, HeldOutText, count_tokens
from metis_hf.lab.evaluate.results import right_items

SAME_FLOAT32 = 1e-5  # relative: sums of a few hundred log-probabilities in another batch shape
LONG = "The clock in the hall struck nine, and nobody came down to breakfast. " * 30
SHORT = "def f(x):\n    return x\n"
CLOZE = {
    "task": "cloze",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "context",
    "doc_to_target": "target",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def folder(tmp_path):
    """Two documents of a cloze task in lm-eval's format."""
    rows = [{"context": f"{n} bottles of", "target": " beer on the wall"} for n in (99, 98)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    (tmp_path / "cloze.yaml").write_text(json.dumps(CLOZE | data))  # JSON is YAML
    return tmp_path


def text_task(*texts):
    return HeldOutText(Path("held_out.txt"), "", list(texts)).task().spec


def test_cloze_agrees_with_direct_scoring(model, tokenizer, folder):
    result = evaluate_model(
        model, tokenizer, ["cloze"], include_path=folder, limit=1, log_samples=True
    )
    context, target = tokenizer.encode("99 bottles of"), tokenizer.encode(" beer on the wall")
    (((likelihood, greedy),),) = result.samples["cloze"][0]["resps"]
    assert (likelihood, greedy) == (
        pytest.approx(scored(model, context, target)[0], rel=SAME_FLOAT32),
        scored(model, context, target)[1],
    )
    assert result.results["cloze"]["acc,none"] == greedy
    assert result.harness["n-samples"]["cloze"] == {"original": 2, "effective": 1}
    assert (result.truncated, result.headline("cloze")[0]) == (0, "acc")


def test_held_out_loss_is_the_cross_entropy(model, tokenizer):
    texts = [LONG, SHORT]
    total = count = 0.0
    for text in texts:
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), CONTEXT):  # HFLM's disjoint windows
            window = ids[start : start + CONTEXT]
            # The last window is filled up with earlier tokens as context.
            first = max(0, start + len(window) - CONTEXT)
            before = [tokenizer.eos_token_id, *ids][first : start + 1]
            total -= scored(model, before, window)[0]
        count += len(ids)
    result = evaluate_model(model, tokenizer, [text_task(*texts)])
    loss = held_out_loss(result, LOSS_TASK, tokenizer, texts)
    assert loss == pytest.approx(total / count, rel=SAME_FLOAT32)
    with pytest.raises(ValueError, match=r"scored \d documents, but 0 were given"):
        held_out_loss(result, LOSS_TASK, tokenizer, [])
    with pytest.raises(ValueError, match="'piqa' has no bits_per_byte"):
        held_out_loss(result, "piqa", tokenizer, texts)


@pytest.mark.parametrize("text", [SHORT, f"<s>{SHORT}"])
def test_prefix_token_of_the_tokenizer_is_not_scored(text, model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=begin
    )
    model.resize_token_embeddings(len(tokenizer))
    result = evaluate_model(model, tokenizer, [text_task(text)])
    ids = torch.tensor([tokenizer.encode(text.removeprefix("<s>"))])
    assert ids[0, 0] == tokenizer.bos_token_id
    with torch.no_grad():
        expected = model.eval()(ids, labels=ids).loss.item()
    loss = held_out_loss(result, LOSS_TASK, tokenizer, [text])
    assert loss == pytest.approx(expected, rel=SAME_FLOAT32)
    assert count_tokens(tokenizer, text) == ids.shape[1] - 1


def test_no_trace_is_left(model, tokenizer, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)  # not a git repository: lm-eval asks git for a hash
    # What libraries do to the process when they are imported is not ours.
    evaluate_model(model, tokenizer, ["cloze"], include_path=folder, limit=1)
    capfd.readouterr()
    model.train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    model.config.use_cache = True
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    environment = dict(os.environ)
    level, init = logging.getLogger("lm_eval").level, vars(tqdm)["__init__"]

    result = evaluate_model(model, tokenizer, ["cloze", text_task(SHORT)], include_path=folder)

    assert [module.training for module in model.modules()] == modes
    assert model.config.use_cache is True
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert dict(os.environ) == environment
    assert logging.getLogger("lm_eval").level == level
    assert vars(tqdm)["__init__"] is init
    assert capfd.readouterr() == ("", "")
    assert set(result.results) == {"cloze", LOSS_TASK}
    assert json.loads(json.dumps(result.results)) == result.results


def test_state_is_restored_after_an_error(model, tokenizer):
    def fail(*_):
        raise RuntimeError("broken layer")

    model.train()
    model.lm_head.register_forward_pre_hook(fail)
    torch.manual_seed(7)
    state, init = torch.get_rng_state(), vars(tqdm)["__init__"]
    with pytest.raises(RuntimeError, match="broken layer"):
        evaluate_model(model, tokenizer, [text_task(SHORT)])
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(tqdm)["__init__"] is init


def test_outer_autocast_reaches_the_model(model, tokenizer):
    seen = set()
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    plain = evaluate_model(model, tokenizer, [text_task(LONG)])
    assert seen == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = evaluate_model(model, tokenizer, [text_task(LONG)])
    assert seen == {torch.bfloat16}
    values = [result.headline(LOSS_TASK)[1] for result in (plain, mixed)]
    assert values[0] != values[1]
    assert values[0] == pytest.approx(values[1], rel=2**-6)  # a few bfloat16 roundings


def test_nan_reaches_the_groups_around_a_group(model, tokenizer, tmp_path):
    """A NaN of one of MMLU's subjects reaches its field, and the score of MMLU."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "2 + 2 =", "choices": ["4", "5"], "label": 0}) + "\n")
    subject = {
        "task": "subject",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}],
    }
    mean = {"aggregate_metric_list": [{"metric": "acc"}]}
    for name, config in (
        ("subject", subject),
        ("field", {"group": "field", "task": ["subject"], **mean}),
        ("whole", {"group": "whole", "task": ["field"], **mean}),
    ):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    result = evaluate_model(model, tokenizer, ["whole", text_task(SHORT)], include_path=tmp_path)
    for name in ("subject", "field", "whole"):
        assert math.isnan(result.results[name]["acc,none"]), name
    assert math.isnan(held_out_loss(result, LOSS_TASK, tokenizer, [SHORT]))


def test_a_request_that_just_fits_is_not_truncated(model, tokenizer, folder):
    """The last token is only predicted: the context has room for one more than its length."""
    row = {"context": "99 bottles of" * 3, "target": " beer on the wall"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tokens = sum(len(tokenizer.encode(text)) for text in row.values())
    for beyond, cut in ((1, 0), (2, 1)):
        length = tokens - beyond
        result = evaluate_model(model, tokenizer, ["cloze"], include_path=folder, max_length=length)
        assert (result.truncated, result.truncated_tokens) == (cut, cut)


def test_a_tokenizer_without_padding_stays_so(model, tokenizer):
    """HFLM pads with the EOS token, or adds a token."""
    backend = tokenizer.backend_tokenizer
    for name in ("bos_token", "eos_token"):
        bare = PreTrainedTokenizerFast(tokenizer_object=backend, **{name: "<|endoftext|>"})
        before = len(bare)
        evaluate_model(model, bare, [text_task("text")])
        assert bare.pad_token is None
        assert len(bare) == before


def test_errors(model, tokenizer, tmp_path, monkeypatch):
    import lm_eval.tasks

    with pytest.raises(ValueError, match="tasks is empty"):
        evaluate_model(model, tokenizer, [])
    with pytest.raises(ValueError, match=r"include_path='.*nowhere' is not a directory"):
        evaluate_model(model, tokenizer, ["demo_loss"], include_path=tmp_path / "nowhere")
    manager = lm_eval.tasks.TaskManager
    hellaswag = Path(lm_eval.tasks.__file__).parent / "hellaswag"

    def small_manager(include_path, include_defaults):  # indexing all of lm-eval takes 16 s
        paths = [hellaswag, *include_path] if include_defaults else include_path
        return manager(include_path=paths, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", small_manager)
    with pytest.raises(ValueError, match=r"unknown tasks \['helaswag'\] .*'hellaswag'"):
        evaluate_model(model, tokenizer, ["helaswag"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r'pip install "metis-hf\[eval\]"'):
        evaluate_model(model, tokenizer, ["demo_loss"])


def test_documents_that_are_logged_once_for_each_filter_count_once():
    """Scores are those of the first filter; so are the items of which paired errors are taken."""
    logged = [
        {"metrics": ["exact_match"], "exact_match": float(value), "filter": name}
        for name, values in (("strict", (1, 0, 0)), ("flexible", (1, 1, 1)))
        for value in values
    ]
    assert right_items(logged) == {"exact_match": "100"}


def test_headline_picks_the_metric_of_the_table():
    both = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": math.nan}
    text = {
        "word_perplexity,none": 9.0,
        "bits_per_byte,none": 2.0,
        "bits_per_byte_stderr,none": "N/A",
    }
    result = EvalResult({"results": {"hellaswag": both, "piqa": both, "text": text}})
    assert result.headline("piqa") == ("acc", 0.5, 0.1)
    name, *numbers = result.headline("hellaswag")
    assert (name, *map(math.isnan, numbers)) == ("acc_norm", True, True)
    name, value, error = result.headline("text")
    assert (name, value, math.isnan(error)) == ("bits_per_byte", 2.0, True)
    with pytest.raises(
        ValueError, match=r"no results for 'boolq'; there are results for \['hellaswag'"
    ):
        result.headline("boolq")
