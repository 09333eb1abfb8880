"""Local tasks: lm-eval's definitions and numbers, and which data are refused."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from lab.evaluate.eval_tools import DATA, make_model
from metis_hf.lab.evaluate import evaluate_model
from metis_hf.lab.evaluate.tasks import LOCAL_TASKS, TASK_FOLDERS, plan_tasks, task_manager

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


def local(task, directory=DATA):
    (planned,) = plan_tasks([task], directory)
    return planned.spec


def rows(task):
    return [json.loads(line) for line in (DATA / f"{task}.jsonl").read_text().splitlines()]


def test_definitions_are_lm_evals_but_for_the_data():
    import lm_eval.tasks
    from lm_eval.config.task import TaskConfig
    from lm_eval.tasks._yaml_loader import load_yaml

    for task in LOCAL_TASKS:
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
        split = f"{LOCAL_TASKS[task][0]}_split"
        assert getattr(theirs, split) == getattr(ours.config, split)  # the split that is scored
        assert len(ours.eval_docs) == len(rows(task))


def test_missing_data_names_the_file_and_its_columns(tmp_path):
    for task, (_, columns) in LOCAL_TASKS.items():
        with pytest.raises(FileNotFoundError, match=rf"{task}\.jsonl is missing") as caught:
            plan_tasks([task], tmp_path)
        assert all(f"{name}: " in str(caught.value) for name in columns)


WRONG = (
    ("arc_easy", "answerKey", "E", "not one of the labels"),
    ("arc_challenge", "choices", {"text": ["a"], "label": ["A"]}, "of one length"),
    ("arc_challenge", "choices", {"text": ["a", "b"]}, "of one length"),
    ("boolq", "label", True, "0 for no, 1 for yes"),
    ("lambada_openai", "text", "word", "at least two words"),
    ("lambada_openai", "text", "a last word ", "the last one, which the model must predict"),
    ("lambada_openai", "text", "a last word\n", "the last one, which the model must predict"),
    ("piqa", "label", "0", "0 for sol1, 1 for sol2"),
    ("race", "problems", [{"question": "q"}], "repr, as a string"),
    ("hellaswag", "label", 0, '"0" to "3", a string'),
    ("hellaswag", "endings", ["a", "b", "c"], "four texts"),
)


def test_wrong_field_is_named_with_its_line(tmp_path):
    for task, name, value, expected in WRONG:
        lines = [json.dumps(row) for row in [*rows(task)[:2], {**rows(task)[2], name: value}]]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines))
        with pytest.raises(ValueError, match=rf'{task}.jsonl, line 3: field "{name}" is') as caught:
            plan_tasks([task], tmp_path)
        assert expected in str(caught.value)
        del (row := rows(task)[0])[name]
        (tmp_path / f"{task}.jsonl").write_text("\n\n" + json.dumps(row))
        with pytest.raises(ValueError, match=rf'line 3: field "{name}" is missing; the line has'):
            plan_tasks([task], tmp_path)


def test_broken_files_are_named(tmp_path):
    for content, message in (
        (b"", "is empty"),
        (b'{"text": "cut sh', "line 1 is not JSON"),
        (b"[1]\n", "line 1 is not a JSON object: [1]"),
        (b"\xff", "line 1 is not JSON ('utf-8' codec can't decode"),
    ):
        (tmp_path / "lambada_openai.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=r"lambada_openai\.jsonl") as caught:
            plan_tasks(["lambada_openai"], tmp_path)
        assert message in str(caught.value)


def test_names_without_a_score_of_their_own(tmp_path):
    """A tag, or a group that averages nothing: results are their members' alone."""
    data = "dataset_path: json\ntest_split: test\noutput_type: loglikelihood\n"
    data += f"dataset_kwargs: {{data_files: {{test: {DATA}/lambada_openai.jsonl}}}}\n"
    data += "doc_to_text: ''\ndoc_to_target: text\nmetric_list: [{metric: acc}]\n"
    for name, content in {
        "one": f"task: one\ntag: several\n{data}",
        "two": f"task: two\ntag: several\n{data}",
        "several": "task: another\n",  # a file of the tag's name
        "bare": "group: bare\ntask: [one, {task: two, num_fewshot: 1}]\n",
        "mean": "group: mean\ntask: [one, two]\naggregate_metric_list: [{metric: acc}]\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    assert [task.name for task in plan_tasks(["mean"], tmp_path)] == ["mean"]
    for name in ("several", "bare"):
        with pytest.raises(
            ValueError, match=f"{name} has no score of its own, .* group of one, two;"
        ):
            plan_tasks([name], tmp_path)


def test_replaced_file_of_same_name_size_and_date_is_read_again(tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    file = tmp_path / "piqa.jsonl"

    def measured():
        (task,) = plan_tasks(["piqa"], tmp_path)
        result = evaluate_model(make_model(), tokenizer, [task.spec])
        return result.headline("piqa")[1], task.data

    shutil.copy(DATA / "piqa.jsonl", file)
    before, (accuracy, digest) = file.stat(), measured()
    first_row, *others = rows("piqa")
    flipped = [{**first_row, "label": 1 - first_row["label"]}, *others]
    file.write_text("".join(json.dumps(row) + "\n" for row in flipped))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    now, other = measured()
    assert abs(now - accuracy) == pytest.approx(1 / len(flipped))
    assert other != digest
    assert not cache.exists()


def test_other_columns_are_left_out(tmp_path):
    """A column of two types, which no table can hold, does no harm."""
    file = tmp_path / "lambada_openai.jsonl"
    file.write_text('{"text": "a b c", "id": 1}\n{"text": "d e f", "id": "x"}\n')
    group = local("lambada_openai", tmp_path)
    task = task_manager([group], None).load([group])["tasks"]["lambada_openai"]
    assert list(task.eval_docs) == [{"text": "a b c"}, {"text": "d e f"}]


def test_all_that_a_task_of_ones_own_reads_counts(tmp_path):
    """Its definition, what that includes and calls, and data that lies elsewhere."""
    folder, elsewhere = tmp_path / "tasks", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    files = {
        folder / "words.yaml": "task: words\ninclude: base.yaml\n",
        folder / "base.yaml": "dataset_path: json\nprocess_docs: !function rows.clean\n"
        f"dataset_kwargs: {{data_files: {{test: '{elsewhere}/*.jsonl'}}}}\ntest_split: test\n"
        "output_type: loglikelihood\ndoc_to_text: ''\ndoc_to_target: text\n"
        "metric_list: [{metric: acc}]\n",
        folder / "rows.py": "def clean(rows):\n    return rows\n",
        elsewhere / "rows.jsonl": '{"text": "one two"}\n',
    }
    for path, content in files.items():
        path.write_text(content)

    def data():
        return plan_tasks(["words"], folder)[0].data

    seen = [data()]
    for path, content in files.items():
        path.write_text(content.replace("one two", "two one") + "\n")
        seen.append(data())
    assert len(set(seen)) == 5
    (folder / "piqa.jsonl").write_text("of another task")
    (folder / "out").mkdir()
    (folder / "out" / "results.json").write_text("{}")
    assert data() == seen[-1]
    (elsewhere / "rows.jsonl").unlink()
    with pytest.raises(ValueError, match=r"words\.yaml cannot be loaded by lm-eval"):
        data()
