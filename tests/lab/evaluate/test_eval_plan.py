"""The input of an evaluation: held-out text, the batch size."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import transformers

from metis_hf.data.chat import read_documents
from metis_hf.lab.evaluate import command, plan, store
from metis_hf.lab.evaluate.plan import read_text


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name in ("marked.txt", "marked.jsonl"):
        text = "Nine." if name.endswith("txt") else '{"text": "Nine."}'
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert plan.read_text(tmp_path / name).documents == ["Nine."]


def test_all_that_a_task_of_ones_own_reads_counts(tmp_path):
    """Its definition, what that includes and calls, and data that lies elsewhere."""
    folder, elsewhere = tmp_path / "tasks", tmp_path / "rows.jsonl"
    folder.mkdir()
    files = {
        folder / "words.yaml": "task: words\ninclude: base.yaml\n",
        folder / "base.yaml": "dataset_path: json\nprocess_docs: !function rows.clean\n"
        f"dataset_kwargs: {{data_files: {{test: [{elsewhere}]}}}}\n",
        folder / "rows.py": "def clean(rows):\n    return rows\n",
        elsewhere: '{"text": "one two"}\n',
    }
    for path, content in files.items():
        path.write_text(content)

    def data():
        return plan.make_plan(["words"], folder, None).tasks[0].data

    before = data()
    assert before.keys() == {"words.yaml", "base.yaml", "rows.py", "data_files/0/rows.jsonl"}
    for path, content in files.items():
        path.write_text(f"{content}\n")
        changed = data()
        assert sum(before[name] != changed[name] for name in before) == 1
        before = changed
    (folder / "piqa.jsonl").write_text("of another task")
    (folder / "out").mkdir()
    (folder / "out" / "results.json").write_text("{}")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "rows.pyc").write_text("")
    assert data() == before


def test_all_data_files_count_wherever_they_lie(tmp_path):
    """Of one name in two folders, by a pattern, and under another task's name; no URL fails."""
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rows.jsonl").write_text(place)
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "piqa.jsonl").write_text("{}")
    named = [f"{tmp_path}/a/*.jsonl", f"{tmp_path}/b/rows.jsonl", f"{folder}/piqa.jsonl"]
    named.append("https://example.org/" + "x" * 300)
    (folder / "words.yaml").write_text(f"dataset_kwargs: {{data_files: {{test: {named}}}}}\n")
    found = plan.make_plan(["words"], folder, None).tasks[0].data
    names = [name.rpartition("/")[2] for name in found]
    assert names == ["words.yaml", "rows.jsonl", "rows.jsonl", "piqa.jsonl"]
    assert len(set(found.values())) == 4


def test_a_batch_size_that_was_chosen_is_remembered(tmp_path):
    """Another one would change the numbers, and what is finished would not be found."""
    sizes = iter([64, 32, 16])
    found = [
        store.known_batch_size(tmp_path, models, lambda: next(sizes))
        for models in ("one", "other", "one", "other")
    ]
    assert found == [(64, False), (32, False), (64, True), (32, True)]
    again = store.known_batch_size(tmp_path, "one", lambda: next(sizes), again=True)
    assert again == (16, False)
    assert store.known_batch_size(tmp_path, "one", lambda: next(sizes)) == (16, True)


@pytest.mark.parametrize(
    ("context", "changes", "tokens"),
    [
        (131_072, {}, 2048),
        (1024, {}, 1024),
        (131_072, {"loss_text": Path("held_out.txt")}, 131_072),
        (131_072, {"tasks": ("piqa", "longbench")}, 131_072),
    ],
)
def test_a_batch_size_is_tried_on_what_tasks_are_known_to_need(context, changes, tokens):
    config = transformers.LlamaConfig(max_position_embeddings=context)
    assert command.longest_sequence(config, command.Options(**changes)) == tokens


def test_largest_batch_that_fits():
    tried = []

    def fits(size):
        tried.append(size)
        return size <= 40

    assert plan.largest_batch_size(fits, start=256) == 32
    assert tried == [256, 128, 64, 32]
    assert plan.largest_batch_size(lambda size: False) == 1


def test_line_ends_of_a_held_out_text_are_those_of_fidelity(tmp_path):
    """Whatever system has written the file; its digest is that of the file itself."""
    path = tmp_path / "held_out.txt"
    content = b"\xef\xbb\xbfone\r\ntwo\rthree\n"
    path.write_bytes(content)
    found = read_text(path)
    assert found.documents == ["one\ntwo\nthree\n"] == [d["text"] for d in read_documents(path)]
    assert found.sha256 == hashlib.sha256(content).hexdigest()
