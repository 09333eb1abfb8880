"""The held-out loss of a text, in nats per token, as a task of lm-eval."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis_hf.data.chat import is_json_lines, refuse_objects
from metis_hf.lab.evaluate.results import EvalResult
from metis_hf.lab.evaluate.tasks import PlannedTask, json_lines
from metis_hf.shared.texts import utf8_text

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

LOSS_TASK = "held_out_loss"
# Losses of tokens have a standard deviation of about 3 nats, the mean of 100 has 0.3.
MIN_LOSS_TOKENS = 100


@dataclass(frozen=True)
class HeldOutText:
    """Documents whose loss is measured, their file and its SHA-256."""

    path: Path
    sha256: str
    documents: list[str]

    def task(self) -> PlannedTask:
        """Return the task that gives the rolling likelihood of the documents."""

        def dataset(**kwargs: Any) -> dict[str, datasets.Dataset]:
            import datasets

            return {"test": datasets.Dataset.from_list([{"text": one} for one in self.documents])}

        spec = {
            "task": LOSS_TASK,
            "dataset_path": "text",
            "custom_dataset": dataset,
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",  # a column: in a template lm-eval reads "[...]" as a list
            "metric_list": [{"metric": "bits_per_byte"}],
            "metadata": {"version": 1.0},
        }
        return PlannedTask(LOSS_TASK, spec, self.sha256)

    def check(self, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> int:
        """Return the number of tokens that will be scored; ValueError if there are too few."""
        count = sum(count_tokens(tokenizer, text) for text in self.documents[:limit])
        if count < MIN_LOSS_TOKENS:
            raise ValueError(
                f"{self.path} contains {count} tokens; a held-out loss needs at least "
                f"{MIN_LOSS_TOKENS}, and thousands to tell two models apart"
            )
        return count


def read_text(path: Path) -> HeldOutText:
    """Read a text file as one document, or JSON lines with a `text` field as one document each.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is empty, a line of JSON has no text, or the file holds JSON lines but
            its name says plain text.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; give held-out text, plain or as JSON lines with a text field"
        )
    if is_json_lines(path):
        documents = []
        for number, row in json_lines(path):
            if not isinstance(row.get("text"), str):
                raise ValueError(
                    f'{path}, line {number}: field "text" is missing or not a string; the fields '
                    f'are {", ".join(row) or "none"}. For example: {{"text": "A document."}}'
                )
            documents.append(row["text"])
    else:
        documents = [utf8_text(path, "utf-8-sig")]
        refuse_objects(path, documents[0])
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"{path} is empty; give held-out text of at least a few thousand tokens")
    return HeldOutText(path, hashlib.sha256(path.read_bytes()).hexdigest(), documents)


def held_out_loss(
    result: EvalResult,
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
) -> float:
    """Return the cross entropy in nats per token of a rolling log-likelihood task.

    lm-eval reports bits per byte. The total over all bytes, divided by the number of tokens that
    were scored, is the loss that training reports; one prefix token precedes each document.
    `documents` are the task's, in order; each is its own target.

    Raises:
        ValueError: If the task has no bits_per_byte or fewer documents are given than were scored.
    """
    values = result.results.get(task, {})
    if "bits_per_byte,none" not in values:
        raise ValueError(
            f"{task!r} has no bits_per_byte (it has {sorted(values)}); name a "
            "loglikelihood_rolling task that was evaluated"
        )
    count = result.harness["n-samples"][task]["effective"]
    if len(documents) < count:
        raise ValueError(
            f"{task!r} scored {count} documents, but {len(documents)} were given; pass the "
            "documents of the task"
        )
    texts = documents[:count]
    nats = values["bits_per_byte,none"] * math.log(2) * sum(len(t.encode()) for t in texts)
    return nats / sum(count_tokens(tokenizer, text) for text in texts)


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the number of tokens of `text` that are scored: all but the prefix token."""
    prefix = tokenizer.bos_token or tokenizer.eos_token
    if prefix and text.startswith(prefix):
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(text)
    return len(ids) - (prefix is not None and ids[:1] == [tokenizer.convert_tokens_to_ids(prefix)])
