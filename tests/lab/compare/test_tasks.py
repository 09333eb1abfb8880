"""The demo tasks: what the items are, and that lm-eval reads them as meant."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest
import yaml
from texts import documents

from metis_hf.data.corpus import Document, split_documents, train_tokenizer
from metis_hf.lab.demo import tasks
from metis_hf.lab.demo.tasks import TASK_NAMES, write_tasks

ITEMS = 250


@pytest.fixture(scope="module")
def splits():
    return split_documents(documents())


@pytest.fixture(scope="module")
def directory(splits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    assert write_tasks(splits.test, folder, items=ITEMS, reference=splits.train) == list(TASK_NAMES)
    return folder


def rows(directory, task):
    return [json.loads(line) for line in (directory / f"{task}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_yaml_is_absolute_and_versioned(directory):
    for task in TASK_NAMES:
        text = (directory / f"{task}.yaml").read_text()
        config = yaml.safe_load(text)
        assert text.startswith("# ")
        assert config["task"] == task
        assert config["dataset_kwargs"]["data_files"]["test"] == str(directory / f"{task}.jsonl")
        assert config["metadata"]["version"] == 1.0


@pytest.mark.slow
def test_same_seed_same_files_other_seed_other_items(splits, directory, tmp_path):
    for seed in (0, 1):
        write_tasks(
            splits.test, tmp_path / str(seed), items=ITEMS, seed=seed, reference=splits.train
        )
    for task in TASK_NAMES:
        assert rows(tmp_path / "0", task) == rows(directory, task)
    for task in ("demo_cloze", "demo_choice"):
        assert rows(tmp_path / "1", task) != rows(directory, task)


def test_loss_documents_are_beginnings(splits, directory):
    texts = {document.path: document.text for document in splits.test}
    found = rows(directory, "demo_loss")
    assert len(found) == min(tasks.LOSS_DOCUMENTS, len(splits.test))
    for row in found:
        assert texts[row["path"]].startswith(row["text"])
        assert len(row["text"]) <= tasks.LOSS_CHARACTERS
        assert row["text"] == texts[row["path"]] or row["text"].endswith("\n")


def test_cloze_targets_are_guessable_words(splits, directory):
    texts = {document.path: document.text for document in splits.test}
    found = rows(directory, "demo_cloze")
    assert len(found) == ITEMS
    for row in found:
        context, target = row["context"], row["target"]
        assert 250 <= len(context) <= tasks.CLOZE_CHARACTERS
        assert re.fullmatch(r" [A-Za-z_]\w+", target)
        assert not context[-1].isspace()
        # The passage is in the file, begins at a line start, and the target is the whole word.
        whole = re.escape(context + target)
        assert re.search(rf"^{whole}(?!\w)", texts[row["path"]], flags=re.MULTILINE)
    # No constant answer scores, and the two words before the target mostly tell it.
    most = Counter(row["target"] for row in found).most_common(1)[0][1]
    assert most <= tasks.CLOZE_SHARE * ITEMS
    following = tasks._following_words(splits.train)
    guessed = 0
    for row in found:
        before = tuple(tasks._WORD.findall(row["context"])[-2:])
        guessed += following[before].most_common(1)[0][0] == row["target"][1:]
    assert guessed > 0.7 * ITEMS


def test_cloze_boundary_is_a_token_boundary(splits, directory):
    tokenizer = train_tokenizer(splits.train, 1024, max_chars=300_000)
    for row in rows(directory, "demo_cloze"):
        context, target = tokenizer.encode(row["context"]), tokenizer.encode(row["target"])
        assert tokenizer.encode(row["context"] + row["target"]) == context + target


def test_choices_give_nothing_away(splits, directory):
    texts = {document.path: document.text for document in splits.test}
    found = rows(directory, "demo_choice")
    assert len(found) == ITEMS
    for row in found:
        right = row["choices"][row["label"]]
        assert len(set(row["choices"])) == 4
        assert 200 <= len(row["context"]) <= 300
        assert f"{row['context']}\n{right}\n" in texts[row["path"]] + "\n"
        for choice in row["choices"]:
            low, high = tasks.CHOICE_CHARACTERS
            assert low <= len(choice) <= high
            assert len(choice) <= (1 + tasks.CHOICE_SLACK) * min(map(len, row["choices"]))
            assert choice == choice.rstrip()
            assert choice.count("\n") < tasks.CHOICE_LINES
            if choice != right:
                assert any(f"\n{choice}" in t for path, t in texts.items() if path != row["path"])


def test_choice_has_no_bias_of_place_or_length(directory):
    found = rows(directory, "demo_choice")
    # Four standard deviations of a binomial with p = 1/4.
    bound = 4 * (ITEMS * 0.25 * 0.75) ** 0.5
    for count in Counter(row["label"] for row in found).values():
        assert abs(count - ITEMS / 4) < bound
    for extreme in (min, max):
        hits = sum(
            extreme(range(4), key=lambda i, row=row: len(row["choices"][i])) == row["label"]
            for row in found
        )
        assert abs(hits - ITEMS / 4) < bound


def test_choices_come_evenly_from_documents(directory):
    task = "demo_choice"
    counts = Counter(row["path"] for row in rows(directory, task))
    assert len(counts) >= 10
    order = list(dict.fromkeys(row["path"] for row in rows(directory, task)))
    # Taken in turns: no document is used again before every one that still has items was.
    assert [row["path"] for row in rows(directory, task)][: len(order)] == order
    most = max(counts.values())
    assert sum(count >= most - 1 for count in counts.values()) >= 2
    for passages in pairwise(sorted(row["context"] for row in rows(directory, task))):
        assert passages[0] != passages[1]


def test_too_few_documents_say_so(tmp_path):
    small = [Document("a.py", "x = 1\n" * 100)]
    with pytest.raises(ValueError, match=r"items=250 of demo_cloze .* 1 documents supply 0"):
        write_tasks(small, tmp_path / "none", reference=small)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="there are no documents"):
        write_tasks([], tmp_path, reference=small)
    with pytest.raises(ValueError, match="items=0"):
        write_tasks(small, tmp_path, reference=small, items=0)


def test_lm_eval_builds_the_requests_we_mean(directory, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tmp_path)  # paths must not depend on the working directory
    manager = TaskManager(include_path=str(directory), include_defaults=False)
    loaded = manager.load(list(TASK_NAMES))["tasks"]
    for task in loaded.values():
        task.build_all_requests(limit=5, rank=0, world_size=1)
    requests = {name: [i.args for i in task.instances] for name, task in loaded.items()}
    assert requests["demo_loss"] == [(row["text"],) for row in rows(directory, "demo_loss")[:5]]
    assert requests["demo_cloze"] == [
        (row["context"], row["target"]) for row in rows(directory, "demo_cloze")[:5]
    ]
    # For the mutual information each choice is asked for without its context too.
    assert requests["demo_choice"] == [
        (context, "\n" + choice)
        for row in rows(directory, "demo_choice")[:5]
        for context in (row["context"], "")
        for choice in row["choices"]
    ]
