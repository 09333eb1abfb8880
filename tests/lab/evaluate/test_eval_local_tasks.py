"""Tasks on local data: lm-eval's definitions, its numbers, and no cache that could be stale."""

from __future__ import annotations

import ast
import json
import os
import shutil

import datasets
import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.config.task import TaskConfig
from lm_eval.tasks._yaml_loader import load_yaml

from lab.evaluate.eval_tools import DATA, make_model, make_tokenizer
from metis_hf.lab.evaluate import evaluate_model
from metis_hf.lab.evaluate.harness import MetisLM
from metis_hf.lab.evaluate.local_tasks import LOCAL_TASKS, local_group, read_task
from metis_hf.lab.evaluate.run import TASK_FOLDERS, check_tasks, task_manager

SOURCE = {
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "custom_dataset",
    "training_split",
    "validation_split",
    "test_split",
    "metadata",  # says where the definition was found
    "tag",  # a name for several tasks, which lm-eval drops on loading
}
SAME_FLOAT32 = 1e-5  # relative: sums of tens of log-probabilities in another batch shape


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def local(*tasks, directory=DATA):
    return local_group([read_task(task, directory) for task in tasks])


def rows(task):
    return [json.loads(line) for line in (DATA / f"{task}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", LOCAL_TASKS)
def test_definition_is_lm_evals_but_for_the_data(task):
    group = local(task)
    ours = task_manager([group], None).load([group])["tasks"][task]
    root = os.path.join(os.path.dirname(lm_eval.tasks.__file__), TASK_FOLDERS[task])
    file = "default" if task == "boolq" else task
    theirs = TaskConfig(**load_yaml(os.path.join(root, f"{file}.yaml"), resolve_func=True))
    shown = [config.to_dict() for config in (ours.config, theirs)]
    ours_fields, their_fields = ({k: c[k] for k in c.keys() - SOURCE} for c in shown)
    assert ours_fields == their_fields
    assert len(ours_fields) > 8
    assert ours.config.metadata["version"] == theirs.metadata["version"]
    split = f"{LOCAL_TASKS[task].split}_split"
    assert getattr(theirs, split) == getattr(ours.config, split)  # the split that is scored
    assert len(ours.eval_docs) == len(rows(task))


def arc(row):
    choices = row["choices"]
    gold = choices["label"].index(row["answerKey"])
    return f"Question: {row['question']}\nAnswer:", choices["text"], gold


def boolq(row):
    prompt = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return prompt, ["no", "yes"], row["label"]


def piqa(row):
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]


def lambada(row):
    *words, last = row["text"].split(" ")
    return " ".join(words), [last], 0


def race(row):
    *answered, last = ast.literal_eval(row["problems"])
    text = f"Article: {row['article']}\n\n"
    for problem in answered:
        right = problem["options"]["ABCD".index(problem["answer"])]
        if problem["question"].endswith("  _  ."):
            text += problem["question"].removesuffix("_  .") + right + "\n"
        else:
            text += f"Question: {problem['question']}\nAnswer: {right}\n"
    return text + last["question"], last["options"], "ABCD".index(last["answer"])


def hellaswag(row):
    def clean(text):
        text = text.strip().replace(" [title]", ". ")
        while "[" in text:
            text = text[: text.index("[")] + text[text.index("]") + 1 :]
        return text.replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return clean(context), [clean(ending) for ending in row["endings"]], int(row["label"])


PROMPTS = {
    "arc_challenge": arc,
    "arc_easy": arc,
    "boolq": boolq,
    "lambada_openai": lambada,
    "piqa": piqa,
    "race": race,
    "hellaswag": hellaswag,
}


@torch.no_grad()
def score(model, tokenizer, prompt, choice):
    """Sum of log-probabilities of " choice" after the prompt, and whether each is the likeliest."""
    stripped = prompt.rstrip()  # spaces at the end belong to the continuation
    whole = tokenizer.encode(f"{prompt} {choice}")
    start = len(tokenizer.encode(stripped))
    logits = model(torch.tensor([whole])).logits[0, start - 1 : -1].double()
    target = torch.tensor(whole[start:])
    total = logits.log_softmax(-1).gather(1, target[:, None]).sum().item()
    return total, bool((logits.argmax(-1) == target).all())


@pytest.mark.parametrize("task", LOCAL_TASKS)
def test_scores_are_those_of_a_plain_loop(task, tokenizer):
    model = make_model()
    group = local(task)
    lm = MetisLM(model, tokenizer=tokenizer, batch_size=4)
    manager = task_manager([group], None)
    raw = lm_eval.simple_evaluate(lm, tasks=[group], task_manager=manager, bootstrap_iters=10)
    hits, normed, greedy = [], [], []
    for row, sample in zip(rows(task), raw["samples"][task], strict=True):
        prompt, choices, gold = PROMPTS[task](row)
        assert sample["arguments"][0] == (prompt, f" {choices[0]}")
        scores = [score(model, tokenizer, prompt, choice) for choice in choices]
        totals = [total for total, _ in scores]
        measured = [likelihood for ((likelihood, _),) in sample["resps"]]
        assert measured == pytest.approx(totals, rel=SAME_FLOAT32)
        hits.append(np.argmax(totals) == gold)
        normed.append(np.argmax(np.divide(totals, [len(c) for c in choices])) == gold)
        greedy.append(scores[0][1])
    results = raw["results"][task]
    if task == "lambada_openai":
        assert results["acc,none"] == np.mean(greedy)
    else:
        assert results["acc,none"] == np.mean(hits)
        assert results.get("acc_norm,none", np.mean(normed)) == np.mean(normed)


@pytest.mark.parametrize("task", LOCAL_TASKS)
def test_missing_data_names_file_fields_and_an_example(task, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        read_task(task, tmp_path)
    message = str(caught.value)
    assert str(tmp_path / f"{task}.jsonl") in message
    for name in LOCAL_TASKS[task].fields:
        assert f"{name}: " in message
    example = json.loads(message.split("for example ")[1])
    (tmp_path / f"{task}.jsonl").write_text(json.dumps(example) + "\n")
    assert read_task(task, tmp_path).rows == [example]  # the example is a valid line


WRONG = [
    ("arc_easy", "answerKey", "E", "not one of the labels"),
    ("arc_challenge", "choices", {"text": ["a"], "label": ["A"]}, "of one length"),
    ("boolq", "label", True, "0 for no, 1 for yes"),
    ("lambada_openai", "text", "word", "at least two words"),
    ("lambada_openai", "text", "a last word ", "which is asked for, at its end"),
    ("lambada_openai", "text", "a last word\n", "which is asked for, at its end"),
    ("piqa", "label", "0", "0 for sol1, 1 for sol2"),
    ("race", "problems", [{"question": "q"}], "repr, as a string"),
    ("hellaswag", "label", 0, '"0" to "3", a string'),
]


@pytest.mark.parametrize(("task", "name", "value", "expected"), WRONG)
def test_wrong_field_is_named_with_its_line(task, name, value, expected, tmp_path):
    lines = [json.dumps(row) for row in [*rows(task)[:2], {**rows(task)[2], name: value}]]
    (tmp_path / f"{task}.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf'{task}.jsonl, line 3: field "{name}" is') as caught:
        read_task(task, tmp_path)
    assert expected in str(caught.value)
    del (row := rows(task)[0])[name]
    (tmp_path / f"{task}.jsonl").write_text("\n\n" + json.dumps(row))
    with pytest.raises(ValueError, match=rf'line 3: field "{name}" is missing; there are'):
        read_task(task, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"text": "cut sh', "line 1 is not JSON"),
        (b"[1]\n", "line 1 is not a JSON object: [1]"),
        (b"\xff", "line 1 is not JSON ('utf-8' codec can't decode"),
    ],
)
def test_broken_files_are_named(content, message, tmp_path):
    file = tmp_path / "lambada_openai.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"lambada_openai\.jsonl") as caught:
        read_task("lambada_openai", tmp_path)
    assert message in str(caught.value)


def test_names_without_a_score_of_their_own(tmp_path):
    """A tag, or a group that averages nothing: results are their members' alone."""
    (tmp_path / "one.yaml").write_text("task: one\ntag: several\n")
    (tmp_path / "two.yaml").write_text("task: two\ntag: several\n")
    (tmp_path / "bare.yaml").write_text("group: bare\ntask: [one, {task: two, num_fewshot: 1}]\n")
    (tmp_path / "mean.yaml").write_text(
        "group: mean\ntask: [one, two]\naggregate_metric_list: [{metric: acc}]\n"
    )
    check_tasks(["one", "mean"], tmp_path)
    for name in ("several", "bare"):
        with pytest.raises(ValueError, match=f"{name} has no score of its own: .* for one, two;"):
            check_tasks(["one", name], tmp_path)


def test_replaced_file_of_same_name_size_and_date_is_read_anew(tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    model = make_model()
    file = tmp_path / "piqa.jsonl"
    shutil.copy(DATA / "piqa.jsonl", file)
    before, first = file.stat(), read_task("piqa", tmp_path)
    accuracy = evaluate_model(model, tokenizer, [local_group([first])]).headline("piqa")[1]
    first_row, *others = rows("piqa")
    flipped = [{**first_row, "label": 1 - first_row["label"]}, *others]
    file.write_text("".join(json.dumps(row) + "\n" for row in flipped))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = read_task("piqa", tmp_path)
    now = evaluate_model(model, tokenizer, [local_group([second])]).headline("piqa")[1]
    assert abs(now - accuracy) == pytest.approx(1 / len(flipped))
    assert first.sha256 != second.sha256
    assert not cache.exists()


def test_other_columns_are_left_out(tmp_path):
    file = tmp_path / "lambada_openai.jsonl"  # a column of two types, which no table can hold
    file.write_text('{"text": "a b c", "id": 1}\n{"text": "d e f", "id": "x"}\n')
    data = read_task("lambada_openai", tmp_path)
    assert data.rows == [{"text": "a b c"}, {"text": "d e f"}]
    assert data.override()["custom_dataset"]()["test"].num_rows == 2
