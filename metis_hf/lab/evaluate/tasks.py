"""lm-eval's tasks and their local data.

A folder of local tasks holds `<task>.yaml` in lm-eval's format, as for its `--include_path`, or
only `<task>.jsonl` for one of the paper's seven tasks. The rows of the latter are checked and
passed on in memory, so that a cache of `datasets` cannot return rows of an earlier file.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from metis_hf.data.chat import refuse_surrogates
from metis_hf.lab.evaluate import isolation
from metis_hf.shared.inputs import digest

if TYPE_CHECKING:
    import datasets
    from lm_eval.tasks import TaskManager

TaskSpec = str | dict[str, Any]
Row = dict[str, Any]

# Folders of lm-eval's tasks: for these names, no index of all tasks is needed (16 s).
TASK_FOLDERS = {
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "boolq": "super_glue/boolq",
    "hellaswag": "hellaswag",
    "lambada_openai": "lambada",
    "piqa": "piqa",
    "race": "race",
    "wikitext": "wikitext",
}
_DEFINITIONS = (".yaml", ".yml", ".py")  # suffixes of the files of lm-eval's tasks


class Column(NamedTuple):
    """The required contents of a column of a task's file, in words and as a test."""

    what: str
    holds: Callable[[Any], bool]


def _is_bit(value: Any) -> bool:
    return type(value) is int and value in (0, 1)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_choices(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() < {"text", "label"}:
        return False
    texts, labels = value["text"], value["label"]
    return _is_texts(texts) and _is_texts(labels) and len(texts) == len(labels) >= 2


def _is_problems(value: Any) -> bool:
    try:
        problems = ast.literal_eval(value) if isinstance(value, str) else None
    except (SyntaxError, ValueError):
        return False
    return isinstance(problems, list) and bool(problems) and all(map(_is_problem, problems))


def _is_problem(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_text(value.get("question"))
        and value.get("answer") in ("A", "B", "C", "D")
        and _is_four_texts(value.get("options"))
    )


def _is_four_texts(value: Any) -> bool:
    return _is_texts(value) and len(value) == 4


TEXT = Column("text", _is_text)
ARC = {
    "question": TEXT,
    "choices": Column('{"text": [...], "label": [...]} of one length', _is_choices),
    "answerKey": Column("the label of the right choice", _is_text),  # last: see `read_rows`
}
# The paper's tasks in the order of its columns -> (the split that lm-eval scores, the columns that
# its documents need).
LOCAL_TASKS: dict[str, tuple[str, dict[str, Column]]] = {
    "arc_challenge": ("test", ARC),
    "arc_easy": ("test", ARC),
    "boolq": (
        "validation",
        {"passage": TEXT, "question": TEXT, "label": Column("0 for no, 1 for yes", _is_bit)},
    ),
    "lambada_openai": (
        "test",
        {
            "text": Column(
                "text of at least two words with nothing after the last one, which the model "
                "must predict",
                lambda v: _is_text(v) and " " in v.strip() and v == v.rstrip(),
            )
        },
    ),
    "piqa": (
        "validation",
        {
            "goal": TEXT,
            "sol1": TEXT,
            "sol2": TEXT,
            "label": Column("0 for sol1, 1 for sol2", _is_bit),
        },
    ),
    "race": (
        "test",
        {
            "article": TEXT,
            "problems": Column(
                "the repr, as a string, of a list of {'question': ..., 'answer': 'A' to 'D', "
                "'options': [four texts]}",
                _is_problems,
            ),
        },
    ),
    "hellaswag": (
        "validation",
        {
            "activity_label": TEXT,
            "ctx_a": TEXT,
            "ctx_b": Column("text, may be empty", lambda v: isinstance(v, str)),
            "endings": Column("a list of four texts", _is_four_texts),
            "label": Column('"0" to "3", a string', lambda v: v in ("0", "1", "2", "3")),
        },
    ),
}


@dataclass(frozen=True)
class PlannedTask:
    """A task to evaluate."""

    name: str  # as asked for
    spec: TaskSpec  # passed to lm-eval
    data: str | None = None  # digest of local data and definition; None where lm-eval fetches them
    include_path: Path | None = None  # of the task's YAML file, if it is not lm-eval's own


def plan_tasks(names: Sequence[str], directory: Path | None) -> list[PlannedTask]:
    """Return the tasks of an evaluation, with their local data read and checked.

    The directory holds `<task>.jsonl` or `<task>.yaml` of each; None lets lm-eval fetch the data.

    Raises:
        FileNotFoundError: the file of a task is missing; the message says what it must hold.
        ValueError: a task is named twice, unknown, or has no score of its own; or a line of its
            data is unusable, and the message has the line's number.
    """
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ValueError(f"tasks named twice: {', '.join(twice)}")
    if directory is not None and not directory.is_dir():
        raise FileNotFoundError(f"tasks-dir {directory} is not a directory")
    planned = [_plan(name, directory) for name in names]
    check_names([task.name for task in planned if task.include_path is None], None)
    return planned


def _plan(name: str, directory: Path | None) -> PlannedTask:
    if directory is None:
        return PlannedTask(name, name)
    if (directory / f"{name}.yaml").is_file():
        check_names([name], directory)
        return PlannedTask(name, name, _digest_of(name, directory), directory)
    if name in LOCAL_TASKS:
        rows = read_rows(name, directory / f"{name}.jsonl")
        return PlannedTask(name, local_task(name, rows), digest(rows))
    raise FileNotFoundError(
        f"{directory / name}.yaml is missing: --tasks-dir must contain the definition of "
        f"{name!r} in lm-eval's format; only {', '.join(LOCAL_TASKS)} need no definition. "
        "Without --tasks-dir, lm-eval downloads its own tasks"
    )


def local_task(name: str, rows: list[Row]) -> dict[str, Any]:
    """Return a group with one of lm-eval's tasks, whose own data `rows` replaces."""
    split = LOCAL_TASKS[name][0]

    def dataset(**kwargs: Any) -> dict[str, datasets.Dataset]:
        import datasets

        return {split: datasets.Dataset.from_list(rows)}

    member = {"task": name, "dataset_path": "json", "dataset_name": None, "custom_dataset": dataset}
    member |= dict.fromkeys(("training_split", "validation_split", "test_split"))
    member |= {f"{split}_split": split}
    return {"group": f"local_{name}", "task": [member]}


def read_rows(task: str, path: Path) -> list[Row]:
    """Read the columns that one of the paper's tasks needs; raises as `plan_tasks`."""
    columns = LOCAL_TASKS[task][1]
    needed = "; ".join(f"{name}: {column.what}" for name, column in columns.items())
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; it must contain the data of {task}, one JSON object per line "
            f"({needed})"
        )
    rows = []
    for number, row in json_lines(path):
        for name, column in columns.items():
            place = f'{path}, line {number}: field "{name}" is'
            if name not in row:
                there = ", ".join(row) or "none"
                raise ValueError(f"{place} missing; the line has {there}, but needs {needed}")
            if not column.holds(row[name]):
                raise ValueError(f"{place} {_short(repr(row[name]))}, expected {column.what}")
        if columns is ARC and row[name] not in (labels := row["choices"]["label"]):
            raise ValueError(f"{place} {row[name]!r}, which is not one of the labels {labels}")
        rows.append({name: row[name] for name in columns})
    if not rows:
        raise ValueError(f"{path} is empty; give one JSON object per line ({needed})")
    return rows


def json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number, object) of every line that is not blank.

    Raises:
        ValueError: a line is not UTF-8, is no JSON object, or holds half a surrogate pair.
    """
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        shown = _short(line.decode(errors="replace"))
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
            raise ValueError(f"{path}, line {number} is not JSON ({error}): {shown}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object: {shown}")
        refuse_surrogates(path, number, row)
        yield number, row


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _digest_of(name: str, directory: Path) -> str:
    """Return a digest of a task's documents, and of all definitions in the task's folder."""
    try:
        with isolation.quiet_harness(progress=False):
            loaded = task_manager([name], directory).load([name])["tasks"]
    except Exception as error:  # of lm-eval, of datasets, or of the task's own code
        raise ValueError(
            f"{directory / name}.yaml cannot be loaded by lm-eval: {type(error).__name__}: {error}"
        ) from None
    data = {
        task: {split: list(rows) for split, rows in (getattr(one, "dataset", None) or {}).items()}
        for task, one in loaded.items()
    }
    files = sorted(path for path in directory.rglob("*") if path.suffix in _DEFINITIONS)
    return digest(data, [path.read_text("utf-8") for path in files if path.is_file()])


def task_manager(
    tasks: Sequence[TaskSpec], include_path: str | Path | Sequence[str | Path] | None
) -> TaskManager:
    """Return a task manager for `tasks`; it indexes all of lm-eval's tasks only if it must.

    Raises:
        ImportError, ValueError: lm_eval is not installed; or a task has an unknown name.
    """
    lm_eval = import_lm_eval()
    own = [include_path] if isinstance(include_path, str | Path) else list(include_path or ())
    for path in own:
        if not Path(path).is_dir():
            raise ValueError(f"include_path={str(path)!r} is not a directory")
    names = {name for spec in tasks for name in _names(spec) if not Path(name).is_file()}
    root = Path(lm_eval.tasks.__file__).parent
    folders = sorted({TASK_FOLDERS[name] for name in names if name in TASK_FOLDERS})
    manager = lm_eval.tasks.TaskManager(
        include_path=[*(root / folder for folder in folders), *own], include_defaults=False
    )
    if names <= set(manager.all_tasks):
        return manager
    manager = lm_eval.tasks.TaskManager(include_path=own, include_defaults=True)
    unknown = sorted(names - set(manager.all_tasks))
    if unknown:
        close = difflib.get_close_matches(unknown[0], manager.all_tasks)
        raise ValueError(
            f"unknown tasks {unknown} (names similar to the first: {close}); neither lm-eval nor "
            f"include_path={[str(path) for path in own]} has them"
        )
    return manager


def check_names(names: Sequence[str], include_path: Path | None) -> None:
    """Reject unknown names, and names of several tasks without a score of their own."""
    index = task_manager(names, include_path).task_index
    for name in (name for name in names if name in index):
        kind, config = index[name].kind.name, index[name].cfg or {}
        if kind == "TAG":
            members = sorted(index[name].tags)
        elif kind == "GROUP" and not config.get("aggregate_metric_list"):
            members = list(_names(config))
        else:
            continue
        raise ValueError(
            f"{name} has no score of its own, because it is a group of {', '.join(members)}; "
            "name some of these instead"
        )


def import_lm_eval() -> ModuleType:
    """Import lm-eval with its tasks, or say how to install it."""
    try:
        import lm_eval.tasks
    except ImportError as error:
        raise ImportError(
            'evaluation needs lm_eval, which is not installed; pip install "metis-hf[eval]"'
        ) from error
    return lm_eval


def _names(spec: TaskSpec, *, member: bool = False) -> Iterator[str]:
    """Yield registered names that a task or group member refers to; none for a definition."""
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec.get("task"), list):
        for each in spec["task"]:
            yield from _names(each, member=True)
    elif member and "task" in spec and not spec.keys() & {"output_type", "class"}:
        yield spec["task"]
