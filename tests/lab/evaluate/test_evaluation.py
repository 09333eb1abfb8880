"""The lm-eval wrapper: same numbers as direct scoring, and no trace on the caller."""

import copy
import json
import logging
import math
import os
import random
import sys
from pathlib import Path

import lm_eval.tasks
import numpy as np
import pytest
import torch
from texts import documents
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from metis_hf.data.corpus import split_documents, train_tokenizer
from metis_hf.lab.demo.tasks import TASK_NAMES, write_tasks
from metis_hf.lab.evaluate import EvalResult, evaluate_model, held_out_loss, run
from metis_hf.lab.evaluate.harness import MetisLM
from metis_hf.lab.evaluate.plan import LOSS_TASK, HeldOutText
from metis_hf.lab.evaluate.run import count_tokens

CONTEXT = 512
SAME_FLOAT32 = 1e-5  # relative: sums of a few hundred log-probabilities in another batch shape
CHOICE_ITEMS = 100


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def splits():
    return split_documents(documents())


@pytest.fixture(scope="module")
def directory(splits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(splits.test, folder, reference=splits.train)
    return folder


@pytest.fixture(scope="module")
def tokenizer(splits):
    return train_tokenizer(splits.train, 1024, max_chars=500_000)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,  # far from uniform, so that scores differ
    )
    return LlamaForCausalLM(config)


def rows(directory, task):
    return [json.loads(line) for line in (directory / f"{task}.jsonl").read_text().splitlines()]


@torch.no_grad()
def score(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum of log-probabilities of `continuation` after `context`, and whether it is greedy."""
    ids = torch.tensor([context + continuation])
    logits = model.eval()(ids).logits[0, len(context) - 1 : -1].double()  # [continuation vocab]
    target = torch.tensor(continuation)
    total = logits.log_softmax(-1).gather(1, target[:, None]).sum().item()
    return total, bool((logits.argmax(-1) == target).all())


@pytest.mark.slow
def test_cloze_and_choice_agree_with_direct_scoring(model, tokenizer, directory):
    limit = 6
    result = evaluate_model(
        model, tokenizer, ["demo_cloze", "demo_choice"], include_path=directory, limit=limit
    )
    scores = [
        score(model, tokenizer.encode(row["context"]), tokenizer.encode(row["target"]))
        for row in rows(directory, "demo_cloze")[:limit]
    ]
    cloze = result.results["demo_cloze"]
    expected = math.exp(-np.mean([total for total, _ in scores]))
    assert cloze["perplexity,none"] == pytest.approx(expected, rel=1e-3)  # exp of a large sum
    assert cloze["acc,none"] == np.mean([greedy for _, greedy in scores])

    hits, normed = [], []
    for row in rows(directory, "demo_choice")[:limit]:
        context = tokenizer.encode(row["context"])
        totals = []
        for choice in row["choices"]:
            whole = tokenizer.encode(f"{row['context']}\n{choice}")
            assert whole[: len(context)] == context
            totals.append(score(model, context, whole[len(context) :])[0])
        lengths = [len(choice) for choice in row["choices"]]
        hits.append(np.argmax(totals) == row["label"])
        normed.append(np.argmax(np.divide(totals, lengths)) == row["label"])
    choice = result.results["demo_choice"]
    assert choice["acc,none"] == pytest.approx(np.mean(hits))
    assert choice["acc_norm,none"] == pytest.approx(np.mean(normed))
    assert result.n_samples["demo_cloze"] == {"original": 250, "effective": limit}
    assert result.truncated == 0


def test_held_out_loss_is_the_training_loss(model, tokenizer, splits, directory):
    result = evaluate_model(
        model, tokenizer, ["demo_loss"], include_path=directory, limit=2, max_length=CONTEXT
    )
    total = count = 0.0
    for row in rows(directory, "demo_loss")[:2]:
        ids = tokenizer.encode(row["text"])
        for start in range(0, len(ids), CONTEXT):  # HFLM's disjoint windows
            window = ids[start : start + CONTEXT]
            # The last window is filled up with earlier tokens as context.
            first = max(0, start + len(window) - CONTEXT)
            before = [tokenizer.eos_token_id, *ids][first : start + 1]
            total -= score(model, before, window)[0]
        count += len(ids)
    loss = held_out_loss(result, "demo_loss", tokenizer, directory / "demo_loss.jsonl")
    assert loss == pytest.approx(total / count, rel=SAME_FLOAT32)
    texts = [row["text"] for row in rows(directory, "demo_loss")]
    assert held_out_loss(result, "demo_loss", tokenizer, texts) == loss


def test_held_out_loss_of_one_short_document_is_cross_entropy(model, tokenizer, splits, tmp_path):
    document = min(splits.test, key=lambda document: len(document.text))
    ids = tokenizer.encode(document.text)[: CONTEXT - 1]
    document = type(document)(document.path, tokenizer.decode(ids))
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"text": document.text}) + "\n")
    task = {
        "task": "one_document",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    result = evaluate_model(model, tokenizer, [task])
    batch = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(document.text)]])
    with torch.no_grad():
        expected = model.eval()(batch, labels=batch).loss.item()
    loss = held_out_loss(result, "one_document", tokenizer, [document])
    assert loss == pytest.approx(expected, rel=SAME_FLOAT32)


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n", "<s>def f(x):\n"])
def test_prefix_token_of_the_tokenizer_is_not_scored(text, model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=begin
    )
    model.resize_token_embeddings(len(tokenizer))
    held_out = HeldOutText(Path("held_out.txt"), "", [text])
    result = evaluate_model(model, tokenizer, [held_out.task()])
    ids = torch.tensor([tokenizer.encode(text.removeprefix("<s>"))])
    assert ids[0, 0] == tokenizer.bos_token_id
    with torch.no_grad():
        expected = model.eval()(ids, labels=ids).loss.item()
    loss = held_out_loss(result, LOSS_TASK, tokenizer, [text])
    assert loss == pytest.approx(expected, rel=SAME_FLOAT32)
    assert count_tokens(tokenizer, text) == ids.shape[1] - 1


def test_random_model_is_at_chance(model, tokenizer, directory):
    result = evaluate_model(
        model, tokenizer, ["demo_choice"], include_path=directory, limit=CHOICE_ITEMS
    )
    bound = 4 * (0.25 * 0.75 / CHOICE_ITEMS) ** 0.5  # four standard deviations
    for metric in ("acc,none", "acc_norm,none"):
        assert abs(result.results["demo_choice"][metric] - 0.25) < bound
    name, value, stderr = result.headline("demo_choice")
    assert name == "acc_mutual_info"
    assert value == result.results["demo_choice"]["acc_mutual_info,none"]
    assert stderr == pytest.approx((value * (1 - value) / (CHOICE_ITEMS - 1)) ** 0.5)


def test_no_trace_is_left(model, tokenizer, directory, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # not a git repository: lm-eval asks git for a hash
    # What libraries do to the process when they are imported is not ours.
    evaluate_model(model, tokenizer, TASK_NAMES[:1], include_path=directory, limit=1)
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

    result = evaluate_model(model, tokenizer, TASK_NAMES, include_path=directory, limit=2)

    assert [module.training for module in model.modules()] == modes
    assert model.config.use_cache is True
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert dict(os.environ) == environment
    assert logging.getLogger("lm_eval").level == level
    assert vars(tqdm)["__init__"] is init
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
    assert set(result.results) == set(TASK_NAMES)
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()


def test_state_is_restored_after_an_error(model, tokenizer, directory):
    def fail(*_):
        raise RuntimeError("broken layer")

    model.train()
    model.lm_head.register_forward_pre_hook(fail)
    torch.manual_seed(7)
    state, init = torch.get_rng_state(), vars(tqdm)["__init__"]
    with pytest.raises(RuntimeError, match="broken layer"):
        evaluate_model(model, tokenizer, ["demo_cloze"], include_path=directory, limit=1)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(tqdm)["__init__"] is init


def test_outer_autocast_reaches_the_model(model, tokenizer, directory):
    seen = set()
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    arguments = {"include_path": directory, "limit": 2}
    plain = evaluate_model(model, tokenizer, ["demo_loss"], **arguments)
    assert seen == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = evaluate_model(model, tokenizer, ["demo_loss"], **arguments)
    assert seen == {torch.bfloat16}
    values = [result.headline("demo_loss")[1] for result in (plain, mixed)]
    assert values[0] != values[1]
    assert values[0] == pytest.approx(values[1], rel=2**-6)  # a few bfloat16 roundings


def test_nan_stays_nan(model, tokenizer, directory):
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    result = evaluate_model(model, tokenizer, ["demo_loss"], include_path=directory, limit=1)
    assert math.isnan(result.headline("demo_loss")[1])
    loss = held_out_loss(result, "demo_loss", tokenizer, directory / "demo_loss.jsonl")
    assert math.isnan(loss)


def test_truncated_requests_are_counted(model, tokenizer, directory):
    result = evaluate_model(
        model, tokenizer, ["demo_cloze"], include_path=directory, limit=4, max_length=32
    )
    assert result.truncated == 4


def test_group_members_override_upstream_tasks(model, tokenizer, tmp_path):
    data = tmp_path / "arc.jsonl"
    row = {
        "question": "Which is a prime?",
        "choices": {"text": ["4", "5", "6", "8"], "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    }
    data.write_text(json.dumps(row) + "\n")
    override = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "training_split": None,
        "validation_split": None,
    }
    group = {"group": "table", "task": [{"task": "arc_challenge", **override}]}
    result = evaluate_model(model, tokenizer, [group])
    assert result.headline("arc_challenge")[0] == "acc_norm"
    assert result.n_samples["arc_challenge"]["original"] == 1


def test_errors(model, tokenizer, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="tasks is empty"):
        evaluate_model(model, tokenizer, [])
    with pytest.raises(ValueError, match=r"include_path='.*nowhere' is not a directory"):
        evaluate_model(model, tokenizer, ["demo_loss"], include_path=tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r'pip install "metis-hf\[eval\]"'):
        evaluate_model(model, tokenizer, ["demo_loss"])


def test_unknown_task_names_the_closest(model, tokenizer, monkeypatch):
    manager = lm_eval.tasks.TaskManager
    folder = Path(lm_eval.tasks.__file__).parent / "hellaswag"

    def small_manager(include_path, include_defaults):  # indexing all of lm-eval takes 16 s
        paths = [folder, *include_path] if include_defaults else include_path
        return manager(include_path=paths, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", small_manager)
    with pytest.raises(ValueError, match=r"unknown tasks \['helaswag'\] .*'hellaswag'"):
        evaluate_model(model, tokenizer, ["helaswag"])


def test_held_out_loss_errors(tokenizer):
    values = {"loss": {"bits_per_byte,none": 1.0}, "piqa": {"acc,none": 0.5}}
    samples = {"loss": {"original": 2, "effective": 2}}
    result = EvalResult(values, versions={}, n_samples=samples)
    with pytest.raises(ValueError, match="'piqa' has no bits_per_byte"):
        held_out_loss(result, "piqa", tokenizer, ["x"])
    with pytest.raises(ValueError, match="scored 2 documents, but 1 were given"):
        held_out_loss(result, "loss", tokenizer, ["x"])


def test_documents_that_are_logged_once_for_each_filter_count_once():
    """Scores are of the first filter; so are the items that paired errors are taken of."""
    logged = [
        {"metrics": ["exact_match"], "exact_match": float(value), "filter": name}
        for name, values in (("strict", (1, 0, 0)), ("flexible", (1, 1, 1)))
        for value in values
    ]
    assert run._items({"gsm8k": logged}, {}) == {"gsm8k": {"exact_match": "100"}}


def test_nan_reaches_the_groups_around_a_group(model, tokenizer, tmp_path):
    """As that of one of MMLU's subjects reaches its field, and the score of MMLU."""
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
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    result = evaluate_model(model, tokenizer, ["whole"], include_path=tmp_path)
    for name in ("subject", "field", "whole"):
        assert math.isnan(result.results[name]["acc,none"]), name


@pytest.mark.parametrize(("tokens", "cut"), [(32, 0), (33, 0), (34, 1), (40, 7)])
def test_a_request_that_just_fits_is_not_truncated(tokens, cut, model, tokenizer):
    """The last token is only predicted: the context has room for one more than its length."""
    lm = MetisLM(pretrained=model, tokenizer=tokenizer, backend="causal", max_length=32)
    request = (("", ""), [1] * (tokens - 2), [2, 3])
    lm._loglikelihood_tokens([request], disable_tqdm=True)
    assert (lm.truncated, lm.truncated_tokens) == (cut > 0, cut)


@pytest.mark.parametrize(
    "special", [{"bos_token": "<|endoftext|>"}, {"eos_token": "<|endoftext|>"}]
)
def test_a_tokenizer_without_padding_stays_so(special, model, tokenizer):
    """HFLM pads with the EOS token, or adds a token."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **special)
    before = len(tokenizer)
    evaluate_model(model, tokenizer, [HeldOutText(Path("held_out.txt"), "", ["text"]).task()])
    assert tokenizer.pad_token is None
    assert len(tokenizer) == before
