"""The input of an evaluation: tasks and their data, held-out text, the batch size."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from metis_hf.data.chat import is_json_lines, refuse_objects
from metis_hf.lab.evaluate.local_tasks import (
    LOCAL_TASKS,
    json_lines,
    local_group,
    read_task,
)
from metis_hf.lab.evaluate.run import TaskSpec, count_tokens
from metis_hf.shared.texts import utf8_text

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOSS_TASK = "held_out_loss"
# Losses of single tokens scatter by about 3 nats: the mean of fewer is off by more than 0.3.
MIN_LOSS_TOKENS = 100
# A CPU gains nothing from more, and the logits of 8 sequences of 1024 GPT-2 tokens take 1.6 GB.
CPU_BATCH_SIZE = 8
_DEFINITIONS = (".yaml", ".yml", ".py")  # endings of files that make up tasks of lm-eval
MAX_BATCH_SIZE = 256


@dataclass(frozen=True)
class HeldOutText:
    """Documents whose loss is measured, and the SHA-256 of their file."""

    path: Path
    sha256: str
    documents: list[str]

    def task(self) -> dict[str, Any]:
        """Return the task, in lm-eval's format, that gives their rolling likelihood."""
        return {
            "task": LOSS_TASK,
            "dataset_path": "text",
            "dataset_kwargs": {"data_files": {"test": str(self.path)}},
            "custom_dataset": self._dataset,
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",  # the column: of a template, lm-eval reads "[...]" as a list
            "metric_list": [{"metric": "bits_per_byte"}],
            "metadata": {"version": 1.0},
        }

    def check(self, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> int:
        """Return tokens that will be scored.

        Raises:
            ValueError: too few to say anything.
        """
        count = sum(count_tokens(tokenizer, text) for text in self.documents[:limit])
        if count < MIN_LOSS_TOKENS:
            raise ValueError(
                f"{self.path} holds {count} tokens; a held-out loss needs at least "
                f"{MIN_LOSS_TOKENS}, and thousands to be told from another"
            )
        return count

    def _dataset(self, **kwargs: Any) -> dict[str, datasets.Dataset]:
        import datasets

        return {"test": datasets.Dataset.from_list([{"text": text} for text in self.documents])}


def read_text(path: Path) -> HeldOutText:
    """Return a text file as one document, or JSON lines with a `text` field as one document each.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is empty, a line of JSON has no text, or there are JSON lines in a file that
            is a text by its name.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; give held-out text, plain or as JSON lines with a text field"
        )
    content = path.read_bytes()
    if is_json_lines(path):
        documents = []
        for number, row in json_lines(path, content):
            if not isinstance(row.get("text"), str):
                raise ValueError(
                    f'{path}, line {number}: field "text" is missing or no string; there are '
                    f'{", ".join(row) or "none"}. For example {{"text": "A document."}}'
                )
            documents.append(row["text"])
    else:
        documents = [utf8_text(path, "utf-8-sig")]
        refuse_objects(path, documents[0])
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"{path} is empty; give held-out text of some thousand tokens")
    return HeldOutText(path, hashlib.sha256(content).hexdigest(), documents)


@dataclass(frozen=True)
class PlannedTask:
    """One task, and what it is measured on.

    Attributes:
        name: as asked for, or `LOSS_TASK`.
        spec: what lm-eval is asked for.
        data: file -> SHA-256; None for data that lm-eval fetches.
        include_path: where lm-eval finds the task's YAML file, if that is not its own.
    """

    name: str
    spec: TaskSpec
    data: dict[str, str | None]
    include_path: Path | None = None


@dataclass(frozen=True)
class EvaluationPlan:
    """Tasks with their data, read once for all checkpoints.

    Attributes:
        tasks: the loss first, then in the order of the columns.
        text: held-out text, if a loss is measured.
    """

    tasks: list[PlannedTask]
    text: HeldOutText | None

    @property
    def specs(self) -> list[TaskSpec]:
        """Return what lm-eval is asked for if all tasks are evaluated at once."""
        return [task.spec for task in self.tasks]

    @property
    def include_path(self) -> Path | None:
        """Where lm-eval finds the YAML files of tasks that are not its own."""
        return next((t.include_path for t in self.tasks if t.include_path is not None), None)


def make_plan(tasks: Sequence[str], directory: Path | None, text: Path | None) -> EvaluationPlan:
    """Read all local data.

    Args:
        tasks: names.
        directory: with `<task>.jsonl` for the paper's tasks, `<task>.yaml` for others; None lets
            lm-eval fetch the data.
        text: a held-out text.

    Raises:
        FileNotFoundError, ValueError: data is missing or malformed, or there is nothing to do.
    """
    if not tasks and text is None:
        raise ValueError("nothing to evaluate: name --tasks, or a --loss-text")
    twice = sorted({task for task in tasks if list(tasks).count(task) > 1})
    if twice:
        raise ValueError(f"tasks named twice: {', '.join(twice)}")
    if directory is not None and not directory.is_dir():
        raise FileNotFoundError(f"tasks-dir {directory} is not a directory")
    planned = []
    held_out = read_text(text) if text is not None else None
    if held_out is not None:
        planned.append(PlannedTask(LOSS_TASK, held_out.task(), {"loss_text": held_out.sha256}))
    planned += [_planned(task, directory) for task in tasks]
    return EvaluationPlan(planned, held_out)


def _planned(task: str, directory: Path | None) -> PlannedTask:
    if directory is None:
        return PlannedTask(task, task, {task: None})
    if task in LOCAL_TASKS:
        local = read_task(task, directory)
        return PlannedTask(task, local_group([local]), {f"{task}.jsonl": local.sha256})
    if not (directory / f"{task}.yaml").is_file():
        raise FileNotFoundError(
            f"{directory / task}.yaml is missing: {task!r} is none of the tasks whose format "
            f"is known ({', '.join(LOCAL_TASKS)}), so --tasks-dir must hold its definition in "
            "lm-eval's format; without --tasks-dir lm-eval fetches its own tasks"
        )
    found = {name: _sha256(path) for name, path in _files_of_own_task(task, directory).items()}
    return PlannedTask(task, task, dict(found), include_path=directory)


def _files_of_own_task(task: str, directory: Path) -> dict[str, Path]:
    """Return what the definition of a task from outside lm-eval may read, by names for settings.

    YAML and Python files of its folder, which it may include and call, the data beside it, and what
    `data_files` names, wherever that is.
    """
    found = (path for path in sorted(directory.rglob("*")) if path.suffix in _DEFINITIONS)
    own = [path for path in found if path.is_file() and not _hidden(path.relative_to(directory))]
    named = [name for path in own if path.suffix != ".py" for name in _data_files(path)]
    data = sorted({path for name in named for path in _matching(name)})
    if (directory / f"{task}.jsonl").is_file():
        own.append(directory / f"{task}.jsonl")
    files = {str(path.relative_to(directory)): path for path in own}
    beside = {path.resolve() for path in own}
    others = (path for path in data if path.resolve() not in beside)
    return files | {f"data_files/{n}/{path.name}": path for n, path in enumerate(others)}


def _matching(name: str) -> list[Path]:
    """Return the files of this machine that an entry of `data_files` names, by a pattern too."""
    try:
        return [Path(path) for path in glob.glob(name, recursive=True) if Path(path).is_file()]
    except OSError:  # no name that a file can have
        return []


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _data_files(path: Path) -> list[str]:
    """Return the strings under `data_files` in a YAML file of lm-eval; none where it is no YAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads lm-eval's tag of Python functions as nothing."""

    Loader.add_constructor("!function", lambda loader, node: None)
    try:
        found = yaml.load(path.read_bytes(), Loader)
    except yaml.YAMLError:
        return []  # lm-eval says what is wrong with it
    arguments = found.get("dataset_kwargs") if isinstance(found, dict) else None
    return _strings(arguments.get("data_files")) if isinstance(arguments, dict) else []


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _strings(each)]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def parse_limits(options: Sequence[str]) -> dict[str, int]:
    """Return `["300", "race=100", ...]` as task -> items; the key "" stands for all other tasks.

    Raises:
        ValueError: a limit that is no number of items.
    """
    chosen: dict[str, int] = {}
    for option in options:
        task, equals, items = option.rpartition("=")
        if not items.isdigit() or int(items) < 1 or (equals and not task):
            raise ValueError(
                f"limit {option!r}; expected a number of items, at least 1, or <task>=<items>"
            )
        chosen[task] = int(items)
    return chosen


def largest_batch_size(fits: Callable[[int], bool], start: int = MAX_BATCH_SIZE) -> int:
    """Return the largest power of two up to `start` (one itself) that fits; 1 if none does."""
    size = start
    while size > 1 and not fits(size):
        size //= 2
    return size


def probe_batch_size(model: PreTrainedModel, tokens: int) -> int:
    """Return the largest batch that a model on an accelerator evaluates, by trying.

    Args:
        model: in evaluation mode, on its device.
        tokens: of the longest sequence.
    """

    def fits(size: int) -> bool:
        try:
            with torch.no_grad():
                ids = torch.ones(size, tokens, dtype=torch.long, device=model.device)
                F.log_softmax(model(ids, use_cache=False).logits, dim=-1, dtype=torch.float32)
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.accelerator.empty_cache()

    return largest_batch_size(fits)
