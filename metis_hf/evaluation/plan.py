"""The input of an evaluation: tasks and their data, held-out text, the batch size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from metis_hf.evaluation.local_tasks import (
    LOCAL_TASKS,
    TaskData,
    json_lines,
    local_group,
    read_task,
)
from metis_hf.evaluation.run import TaskSpec, count_tokens

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOSS_TASK = "held_out_loss"
# Losses of single tokens scatter by about 3 nats: the mean of fewer is off by more than 0.3.
MIN_LOSS_TOKENS = 100
# A CPU gains nothing from more, and the logits of 8 sequences of 1024 GPT-2 tokens take 1.6 GB.
CPU_BATCH_SIZE = 8
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
        ValueError: it is empty, or a line of JSON has no text.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; give held-out text, plain or as JSON lines with a text field"
        )
    content = path.read_bytes()
    if path.suffix in (".jsonl", ".json"):
        documents = []
        for number, row in json_lines(path, content):
            if not isinstance(row.get("text"), str):
                raise ValueError(
                    f'{path}, line {number}: field "text" is missing or no string; there are '
                    f'{", ".join(row) or "none"}. For example {{"text": "A document."}}'
                )
            documents.append(row["text"])
    else:
        try:
            documents = [content.decode()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error})") from None
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"{path} is empty; give held-out text of some thousand tokens")
    return HeldOutText(path, hashlib.sha256(content).hexdigest(), documents)


@dataclass(frozen=True)
class EvaluationPlan:
    """Tasks with their data, read once for all checkpoints.

    Attributes:
        tasks: names, in the order of the columns.
        local: data of those that come from local files of the paper's tasks.
        own: names of those that a YAML file in `directory` defines.
        directory: with the local files.
        text: held-out text, if a loss is measured.
        fingerprints: file -> SHA-256; None for tasks whose data lm-eval fetches.
    """

    tasks: list[str]
    local: list[TaskData]
    own: list[str]
    directory: Path | None
    text: HeldOutText | None
    fingerprints: dict[str, str | None] = field(default_factory=dict)

    @property
    def specs(self) -> list[TaskSpec]:
        """Return what lm-eval is asked for."""
        names = {data.task for data in self.local}
        specs: list[TaskSpec] = [task for task in self.tasks if task not in names]
        if self.local:
            specs.insert(0, local_group(self.local))
        return specs + ([self.text.task()] if self.text is not None else [])

    @property
    def include_path(self) -> Path | None:
        """Where lm-eval finds the YAML files of `own`."""
        return self.directory if self.own else None


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
    held_out = read_text(text) if text is not None else None
    local: list[TaskData] = []
    own: list[str] = []
    fingerprints: dict[str, str | None] = {}
    if directory is None:
        fingerprints |= dict.fromkeys(tasks)
    else:
        if not directory.is_dir():
            raise FileNotFoundError(f"tasks-dir {directory} is not a directory")
        local = [read_task(task, directory) for task in tasks if task in LOCAL_TASKS]
        fingerprints |= {f"{data.task}.jsonl": data.sha256 for data in local}
        own = [task for task in tasks if task not in LOCAL_TASKS]
        fingerprints |= _own_files(own, directory)
    if held_out is not None:
        fingerprints["loss_text"] = held_out.sha256
    return EvaluationPlan(list(tasks), local, own, directory, held_out, fingerprints)


def _own_files(tasks: Sequence[str], directory: Path) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for task in tasks:
        if not (directory / f"{task}.yaml").is_file():
            raise FileNotFoundError(
                f"{directory / task}.yaml is missing: {task!r} is none of the tasks whose format "
                f"is known ({', '.join(LOCAL_TASKS)}), so --tasks-dir must hold its definition in "
                "lm-eval's format; without --tasks-dir lm-eval fetches its own tasks"
            )
        for file in (directory / f"{task}.yaml", directory / f"{task}.jsonl"):
            if file.is_file():
                found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


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
