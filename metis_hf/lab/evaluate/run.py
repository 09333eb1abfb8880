"""Evaluate a model in memory through lm-eval, in the middle of training or after it.

`evaluate_model` is the one door to lm-eval: it leaves the random state, the training modes and the
model's config as they were, loads only the task folders it needs, and keeps quiet. lm-eval's own
caches stay off: neither of them knows which model or which data an entry belongs to.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from metis_hf.data.corpus import Document
from metis_hf.lab.evaluate import isolation
from metis_hf.lab.evaluate.results import EvalResult

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Folders of lm-eval's tasks, so that these names do not cost an index of all of them.
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

TaskSpec = str | dict[str, Any]


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[TaskSpec],
    *,
    include_path: str | Path | Sequence[str | Path] | None = None,
    batch_size: int = 16,
    limit: int | float | None = None,
    max_length: int | None = None,
    bootstrap_iters: int = 1000,
    progress: bool = False,
    per_item: bool = False,
) -> EvalResult:
    """Run lm-eval on a model in memory, without a trace on the model or the random state.

    Log-probabilities are taken in float32. Under an outer `torch.autocast` the forward passes run
    under the same autocast. Sequences are padded on the right without a mask, which is exact for
    causal attention, but a quantizer whose scale spans the batch sees the padding, so results of
    quantized models can depend on `batch_size`, and on the other tasks of the call, whose requests
    lm-eval sorts into the same batches; keep both fixed within a comparison.

    In a distributed run every rank that calls this evaluates everything and gets the result.

    Args:
        model: A causal language model, unwrapped (not DDP or FSDP), on any device.
        tokenizer: Its tokenizer.
        tasks: Task names, or dicts in lm-eval's format. A dict `{"group": ..., "task": [...]}` has
            its members merged with the registered tasks; a dict `{"task": ...}` stands alone.
        include_path: Folders with more task YAMLs; they take precedence over lm-eval's own.
        batch_size: Sequences per forward pass.
        limit: Only the first documents of each task (a share if below 1); for smoke tests.
        max_length: Context in tokens; `None` takes the model config's.
        bootstrap_iters: Resamples for the standard error of perplexities; 0 gives no errors at all.
        progress: Show lm-eval's progress bars.
        per_item: Keep which documents were right, for paired comparisons.

    Raises:
        ImportError: If lm_eval is not installed.
        ValueError: If there are no tasks or one has an unknown name.
    """
    lm_eval = _import_harness()
    from metis_hf.lab.evaluate.harness import MetisLM

    if not tasks:
        raise ValueError("tasks is empty; name at least one")
    if tokenizer.pad_token is None:  # HFLM sets one, or adds one
        tokenizer = copy.deepcopy(tokenizer)
    device_type = model.device.type
    autocast = torch.is_autocast_enabled(device_type)
    with contextlib.ExitStack() as stack:
        # Every rank computes everything, yet lm-eval keeps the result on local rank 0 alone, and it
        # forks a process per core for the bootstrap unless told otherwise.
        stack.enter_context(isolation.environment(DISABLE_MULTIPROC="1", LOCAL_RANK="0"))
        stack.enter_context(isolation.quiet_harness(progress))
        stack.enter_context(isolation.preserve_random_state(device_type))
        stack.enter_context(isolation.preserve_model(model))
        manager = task_manager(tasks, include_path)
        lm = MetisLM(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=max_length,
            # HFLM switches an outer autocast off unless it is told the type.
            mixed_precision_dtype=torch.get_autocast_dtype(device_type) if autocast else None,
        )
        raw = lm_eval.simple_evaluate(
            model=lm,
            tasks=list(tasks),
            task_manager=manager,
            batch_size=batch_size,
            limit=limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=per_item,
        )
    items = _items(raw.pop("samples", {}), lm.nonfinite)
    harness = _plain(raw)
    _mark_nan(harness, lm.nonfinite)
    return EvalResult(
        results=harness["results"],
        versions=harness["versions"],
        n_samples=harness["n-samples"],
        truncated=lm.truncated,
        truncated_tokens=lm.truncated_tokens,
        nonfinite=dict(lm.nonfinite),
        items=items,
        harness=harness,
    )


def held_out_loss(
    result: EvalResult,
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document | str] | str | Path,
) -> float:
    """Return the cross entropy in nats per token of a rolling log-likelihood task.

    lm-eval reports bits per byte; the total over all bytes divided by the number of tokens that
    were scored is the loss that training reports, each document being preceded by one prefix token.

    Args:
        result: Holds `bits_per_byte` of `task`.
        task: A `loglikelihood_rolling` task whose target is the document itself (`demo_loss`).
        tokenizer: The tokenizer of the evaluation.
        documents: The task's documents in order, or the path of its JSONL with a `text` column.

    Raises:
        ValueError: If the task has no bits_per_byte or fewer documents are given than were scored.
    """
    values = result.results.get(task, {})
    if "bits_per_byte,none" not in values:
        raise ValueError(
            f"{task!r} has no bits_per_byte (it has {sorted(values)}); pass a "
            "loglikelihood_rolling task that was evaluated"
        )
    if isinstance(documents, str | Path):
        with open(documents, encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
    else:
        texts = [item if isinstance(item, str) else item.text for item in documents]
    count = result.n_samples[task]["effective"]
    if len(texts) < count:
        raise ValueError(
            f"{task!r} scored {count} documents, but {len(texts)} were given; pass the task's own"
        )
    texts = texts[:count]
    nats = values["bits_per_byte,none"] * math.log(2) * sum(len(t.encode()) for t in texts)
    return nats / sum(count_tokens(tokenizer, text) for text in texts)


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return tokens of `text` that `MetisLM` scores: without the prefix token before them."""
    prefix = tokenizer.bos_token or tokenizer.eos_token
    if prefix and text.startswith(prefix):
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(text)
    return len(ids) - (prefix is not None and ids[:1] == [tokenizer.convert_tokens_to_ids(prefix)])


def _items(samples: Mapping[str, list[dict]], nonfinite: Mapping[str, int]) -> dict:
    """Return task -> metric -> one digit per document, for metrics that are 0 or 1.

    lm-eval logs a document once for each filter of its task; scores are those of the first.
    """
    found: dict[str, dict[str, str]] = {}
    for task, logged in samples.items():
        documents = [each for each in logged if each.get("filter") == logged[0].get("filter")]
        metrics = [] if task in nonfinite or not documents else documents[0]["metrics"]
        for metric in metrics:
            values: list[Any] = [document.get(metric) for document in documents]
            if all(isinstance(value, int | float) and value in (0, 1) for value in values):
                digits = "".join(str(int(value)) for value in values)
                found.setdefault(task, {})[metric] = digits
    return found


def _mark_nan(harness: dict[str, Any], nonfinite: Mapping[str, int]) -> None:
    """Make every metric NaN of tasks with NaN likelihoods, and of their groups, in place."""
    bad, groups = set(nonfinite), harness.get("group_subtasks", {})
    # A group may lie in another, which is listed before it.
    while around := {name for name in groups.keys() - bad if bad & set(groups[name])}:
        bad |= around
    for section in ("results", "groups"):
        for task, values in harness.get(section, {}).items():
            for key, value in values.items():
                if task in bad and "," in key and isinstance(value, int | float):
                    values[key] = math.nan


def task_manager(
    tasks: Sequence[TaskSpec], include_path: str | Path | Sequence[str | Path] | None
) -> TaskManager:
    """Return a task manager that knows `tasks`, and all of lm-eval's (16 s) only if it must.

    Raises:
        ImportError: If lm_eval is not installed.
        ValueError: If a task has an unknown name.
    """
    lm_eval = _import_harness()
    if include_path is None:
        own: list[str | Path] = []
    elif isinstance(include_path, str | Path):
        own = [include_path]
    else:
        own = list(include_path)
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
            f"unknown tasks {unknown} (close to the first: {close}); they are neither in lm-eval "
            f"nor below include_path={[str(path) for path in own]}"
        )
    return manager


def check_tasks(
    tasks: Sequence[TaskSpec], include_path: str | Path | Sequence[str | Path] | None
) -> None:
    """Refuse names that lm-eval gives no score: unknown ones, and those that stand for several.

    Raises:
        ImportError, ValueError: as `task_manager`; or a tag, or a group without a score of its own.
    """
    index = task_manager(tasks, include_path).task_index
    for name in (spec for spec in tasks if isinstance(spec, str) and spec in index):
        kind, config = index[name].kind.name, index[name].cfg or {}
        if kind == "TAG":
            members = sorted(index[name].tags)
        elif kind == "GROUP" and not config.get("aggregate_metric_list"):
            members = list(_names(config))
        else:
            continue
        raise ValueError(
            f"{name} has no score of its own: it stands for {', '.join(members)}; name some of "
            "these instead"
        )


def _import_harness() -> ModuleType:
    try:
        import lm_eval.tasks
    except ImportError as error:
        raise ImportError(
            'evaluation needs lm_eval, which is not installed; pip install "metis-hf[eval]"'
        ) from error
    return lm_eval


def _names(spec: TaskSpec) -> Iterator[str]:
    """Collect registered names that a task or group refers to; inline definitions have none."""
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec.get("task"), list):
        for member in spec["task"]:
            yield from _names(member) if isinstance(member, str) else _member_names(member)


def _member_names(member: dict[str, Any]) -> Iterator[str]:
    if isinstance(member.get("task"), str) and not member.keys() & {"output_type", "class"}:
        yield member["task"]
    else:
        yield from _names(member)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, str | int | float | bool | None) else str(value)
