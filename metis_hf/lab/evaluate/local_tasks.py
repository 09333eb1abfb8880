"""The paper's seven tasks from local JSON lines, with lm-eval's own prompts and scoring.

Only the data source and the splits of lm-eval's definitions are replaced. The rows are read here,
once, and handed over in memory: no cache of `datasets` is asked, so a file that was replaced by
another of the same name, size and date is read as it is now.
"""

from __future__ import annotations

import ast
import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis_hf.data.chat import refuse_surrogates

if TYPE_CHECKING:
    import datasets

Row = dict[str, Any]


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _string(value: Any) -> bool:
    return isinstance(value, str)


def _texts(count: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == count and all(map(_text, value))


def _binary(value: Any) -> bool:
    return type(value) is int and value in (0, 1)


def _cloze(value: Any) -> bool:
    # lm-eval asks for what follows the last space.
    return _text(value) and " " in value.strip() and value == value.rstrip()


def _choices(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    texts, labels = value.get("text"), value.get("label")
    return (
        isinstance(texts, list)
        and isinstance(labels, list)
        and len(texts) == len(labels) >= 2
        and all(map(_text, [*texts, *labels]))
    )


def _problems(value: Any) -> bool:
    """Return a string, as the published data has it, that is the repr of a list of problems."""
    try:
        problems = ast.literal_eval(value) if isinstance(value, str) else None
    except (SyntaxError, ValueError):
        return False
    return (
        isinstance(problems, list)
        and bool(problems)
        and all(
            isinstance(problem, dict)
            and _text(problem.get("question"))
            and problem.get("answer") in ("A", "B", "C", "D")
            and _texts(4)(problem.get("options"))
            for problem in problems
        )
    )


@dataclass(frozen=True)
class Field:
    """A column of a task's file: what it must be, in words and as a test."""

    what: str
    check: Callable[[Any], bool]


@dataclass(frozen=True)
class LocalTask:
    """A task's file: the split that lm-eval scores, its columns, and a line as an example."""

    split: str
    fields: dict[str, Field]
    example: Row
    check: Callable[[Row], str | None] = lambda row: None


def _answer_is_a_label(row: Row) -> str | None:
    labels = row["choices"]["label"]
    if row["answerKey"] in labels:
        return None
    return f'field "answerKey" is {row["answerKey"]!r}, not one of the labels {labels}'


_ARC = LocalTask(
    "test",
    {
        "question": Field("text", _text),
        "choices": Field('{"text": [...], "label": [...]} of one length', _choices),
        "answerKey": Field("the label of the right choice", _text),
    },
    {
        "question": "Which of these conducts electricity?",
        "choices": {"text": ["wood", "copper", "glass", "wool"], "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    _answer_is_a_label,
)

# In the order of the paper's columns.
LOCAL_TASKS = {
    "arc_challenge": _ARC,
    "arc_easy": _ARC,
    "boolq": LocalTask(
        "validation",
        {
            "passage": Field("text", _text),
            "question": Field("text without question mark", _text),
            "label": Field("0 for no, 1 for yes", _binary),
        },
        {
            "passage": "Salt lowers the temperature at which water freezes.",
            "question": "does salt water freeze at a lower temperature than fresh water",
            "label": 1,
        },
    ),
    "lambada_openai": LocalTask(
        "test",
        {
            "text": Field(
                "text of at least two words, the last one, which is asked for, at its end", _cloze
            )
        },
        {"text": "He put the key into the lock, turned it, and opened the door"},
    ),
    "piqa": LocalTask(
        "validation",
        {
            "goal": Field("text", _text),
            "sol1": Field("text", _text),
            "sol2": Field("text", _text),
            "label": Field("0 for sol1, 1 for sol2", _binary),
        },
        {
            "goal": "keep bread fresh",
            "sol1": "Store it in a closed box.",
            "sol2": "Store it in a bowl of water.",
            "label": 0,
        },
    ),
    "race": LocalTask(
        "test",
        {
            "article": Field("text", _text),
            "problems": Field(
                "the repr, as a string, of a list of {'question': ..., 'answer': 'A' to 'D', "
                "'options': [four texts]}; the last one is scored",
                _problems,
            ),
        },
        {
            "article": "Ann walked to the lake. It was frozen, so she went home again.",
            "problems": repr(
                [
                    {
                        "question": "Why did Ann go home?",
                        "answer": "C",
                        "options": ["She was tired.", "It rained.", "Ice.", "It was late."],
                    }
                ]
            ),
        },
    ),
    "hellaswag": LocalTask(
        "validation",
        {
            "activity_label": Field("text", _text),
            "ctx_a": Field("text", _text),
            "ctx_b": Field("text, may be empty", _string),
            "endings": Field("list of four texts", _texts(4)),
            "label": Field('"0" to "3", a string', lambda v: v in ("0", "1", "2", "3")),
        },
        {
            "activity_label": "Making tea",
            "ctx_a": "A woman pours hot water into a cup.",
            "ctx_b": "she",
            "endings": ["drops a tea bag in.", "paints it.", "flies away.", "eats the cup."],
            "label": "0",
        },
    ),
}


@dataclass(frozen=True)
class TaskData:
    """A task's rows as they were when the file was read, and the SHA-256 of the file."""

    task: str
    path: Path
    sha256: str
    rows: list[Row]

    def override(self) -> dict[str, Any]:
        """Return what replaces the data source in lm-eval's definition of the task."""
        split = LOCAL_TASKS[self.task].split
        splits = {"training_split": None, "validation_split": None, "test_split": None}
        return {
            "task": self.task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(self.path)}},
            "custom_dataset": self._dataset,
            **splits,
            f"{split}_split": split,
        }

    def _dataset(self, **kwargs: Any) -> dict[str, datasets.Dataset]:
        """Do nothing with lm-eval's metadata and `dataset_kwargs`; the rows are here already."""
        import datasets

        return {LOCAL_TASKS[self.task].split: datasets.Dataset.from_list(self.rows)}


def local_group(data: Sequence[TaskData]) -> dict[str, Any]:
    """Return a group of lm-eval's tasks on local data; lm-eval merges each with its own."""
    names = "_".join(item.task for item in data)
    return {"group": f"local_{names}", "task": [item.override() for item in data]}


def read_task(task: str, directory: Path) -> TaskData:
    """Read and checks `<directory>/<task>.jsonl`.

    Raises:
        FileNotFoundError: there is no such file; the message says what it must hold.
        ValueError: a line is no JSON object or lacks a field; the message has the line number.
    """
    path = directory / f"{task}.jsonl"
    spec = LOCAL_TASKS[task]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, the data of {task}. {_format(task)}")
    content = path.read_bytes()
    rows = []
    for number, row in json_lines(path, content):
        problem = _problem(spec, row)
        if problem:
            raise ValueError(f"{path}, line {number}: {problem}. {_format(task)}")
        rows.append({name: row[name] for name in spec.fields})
    if not rows:
        raise ValueError(f"{path} is empty. {_format(task)}")
    return TaskData(task, path, hashlib.sha256(content).hexdigest(), rows)


def json_lines(path: Path, content: bytes) -> list[tuple[int, Row]]:
    """Return (line number, object) of every line that is not blank.

    Raises:
        ValueError: a line is not UTF-8, no JSON object, or holds half a character; the message
            names file and line.
    """
    rows = []
    for number, line in enumerate(content.removeprefix(BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # UnicodeDecodeError is one
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): {_shown(line)}"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object: {_shown(line)}")
        refuse_surrogates(path, number, row)
        rows.append((number, row))
    return rows


def _problem(spec: LocalTask, row: Row) -> str | None:
    for name, column in spec.fields.items():
        if name not in row:
            return f'field "{name}" is missing; there are {", ".join(row) or "none"}'
        if not column.check(row[name]):
            return f'field "{name}" is {_shown(repr(row[name]))}, expected {column.what}'
    return spec.check(row)


def _format(task: str) -> str:
    spec = LOCAL_TASKS[task]
    columns = "; ".join(f"{name}: {column.what}" for name, column in spec.fields.items())
    return f"One JSON object a line ({columns}), for example {json.dumps(spec.example)}"


def _shown(text: str | bytes) -> str:
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    return shown if len(shown) <= 80 else shown[:77] + "..."
