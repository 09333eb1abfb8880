"""Evaluate a model through lm-eval, in the middle of training or after it.

`evaluate_model` is the one door to lm-eval: it leaves the random state, the training modes and the
model's config as they were, loads only the task folders it needs, and keeps quiet. Importing this
module imports neither lm_eval nor datasets. Tables made of results live elsewhere.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import logging
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from metis_hf.corpus import Document

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What a table shows where it is not plain accuracy.
HEADLINE_METRICS = {
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    # Likelihood relative to the choice without context: a small model's likelihoods vary more
    # between texts than between contexts.
    "demo_choice": "acc_mutual_info",
}

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


@dataclass(frozen=True)
class EvalResult:
    """What lm-eval measured, as plain JSON-able data.

    Attributes:
        results: Per task and group, `"<metric>,<filter>"` and `"<metric>_stderr,<filter>"`.
        versions: Per task, the version in its YAML.
        n_samples: Per task, `"original"` and `"effective"` (after `limit`) numbers of documents.
        truncated: Number of requests longer than the model's context, cut from the left.
    """

    results: dict[str, dict[str, Any]]
    versions: dict[str, Any]
    n_samples: dict[str, dict[str, int]]
    truncated: int = 0

    def headline(self, task: str) -> tuple[str, float, float]:
        """The metric a table shows: as in `HEADLINE_METRICS`, else acc, else the likeliest.

        Returns:
            (metric name, value, standard error); the error is NaN where lm-eval gives none.

        Raises:
            ValueError: If the task was not evaluated or has no metric.
        """
        if task not in self.results:
            raise ValueError(f"no results for {task!r}; there are {sorted(self.results)}")
        values: dict[str, Any] = {}
        errors: dict[str, Any] = {}
        for key, value in self.results[task].items():
            metric, comma, _ = key.partition(",")
            if not comma:  # alias, sample_len
                continue
            into = errors if metric.endswith("_stderr") else values
            into.setdefault(metric.removesuffix("_stderr"), value)
        if not values:
            raise ValueError(f"{task!r} has no metrics, only {sorted(self.results[task])}")
        preferred = [HEADLINE_METRICS[task]] if task in HEADLINE_METRICS else []
        preferred += ["acc", "bits_per_byte", *values]
        metric = next(name for name in preferred if name in values)
        return metric, _as_float(values[metric]), _as_float(errors.get(metric))

    def to_dict(self) -> dict[str, Any]:
        """The four attributes, ready for `json.dump`."""
        return {
            "results": self.results,
            "versions": self.versions,
            "n_samples": self.n_samples,
            "truncated": self.truncated,
        }


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
) -> EvalResult:
    """Run lm-eval on a model in memory, without a trace on the model or the random state.

    Log-probabilities are taken in float32. Under an outer `torch.autocast` the forward passes run
    under the same autocast. Sequences are padded on the right without a mask, which is exact for
    causal attention, but a quantizer whose scale spans the batch sees the padding, so results of
    quantized models can depend on `batch_size`; keep it fixed within a comparison.

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

    Raises:
        ImportError: If lm_eval is not installed.
        ValueError: If there are no tasks or one has an unknown name.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(
            'evaluation needs lm_eval, which is not installed; pip install "metis-hf[eval]"'
        ) from error

    if not tasks:
        raise ValueError("tasks is empty; name at least one")
    device_type = model.device.type
    autocast = torch.is_autocast_enabled(device_type)
    with contextlib.ExitStack() as stack:
        # Every rank computes everything, yet lm-eval keeps the result on local rank 0 alone, and it
        # forks a process per core for the bootstrap unless told otherwise.
        stack.enter_context(_environment(DISABLE_MULTIPROC="1", LOCAL_RANK="0"))
        log = stack.enter_context(_quiet(progress))
        stack.enter_context(_preserve_random_state(device_type))
        stack.enter_context(_preserve_model(model, tokenizer))
        manager = _task_manager(tasks, include_path)
        lm = HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=max_length,
            softmax_dtype=torch.float32,
            # HFLM switches an outer autocast off unless it is told the type.
            mixed_precision_dtype=torch.get_autocast_dtype(device_type) if autocast else None,
        )
        raw = lm_eval.simple_evaluate(
            model=lm,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=False,
        )
    return EvalResult(
        results=_plain(raw["results"]),
        versions=_plain(raw["versions"]),
        n_samples=_plain(raw["n-samples"]),
        truncated=log.truncated,
    )


def held_out_loss(
    result: EvalResult,
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document | str] | str | Path,
) -> float:
    """Cross entropy in nats per token of a rolling log-likelihood task.

    lm-eval reports bits per byte; the total over all bytes divided by the number of tokens that
    HFLM scored is the loss that training reports, each document being preceded by one prefix token.

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
    return nats / sum(_count_tokens(tokenizer, text) for text in texts)


def _count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Tokens of `text` as HFLM encodes it: no second prefix token where the text brings one."""
    prefix = tokenizer.bos_token or tokenizer.eos_token
    if prefix and text.startswith(prefix):
        return len(tokenizer.encode(text, add_special_tokens=False))
    return len(tokenizer.encode(text))


def _task_manager(
    tasks: Sequence[TaskSpec], include_path: str | Path | Sequence[str | Path] | None
) -> TaskManager:
    """A task manager that knows `tasks`, and all of lm-eval's only when it must (about 16 s)."""
    import lm_eval.tasks

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


def _names(spec: TaskSpec) -> Iterator[str]:
    """Registered names that a task or group refers to; inline definitions refer to none."""
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


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _preserve_random_state(device_type: str) -> Iterator[None]:
    """lm-eval seeds python, numpy and torch; a training run must not notice."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    count = 0 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    kind = "cuda" if device_type == "cpu" else device_type
    try:
        with torch.random.fork_rng(devices=range(count), device_type=kind):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def _preserve_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Evaluate without a key-value cache; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    had_cache_flag = hasattr(model.config, "use_cache")
    use_cache = getattr(model.config, "use_cache", None)
    pad_token = tokenizer.pad_token  # HFLM sets one where there is none
    model.config.use_cache = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        if had_cache_flag:
            model.config.use_cache = use_cache
        else:
            del model.config.use_cache
        if tokenizer.pad_token != pad_token:
            tokenizer.pad_token = pad_token


class _HarnessLog(logging.Filter):
    """Drops HFLM's notes below errors, and counts the truncations among them."""

    truncated = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.truncated += "Truncating" in record.getMessage()
        return record.levelno >= logging.ERROR


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[_HarnessLog]:
    """Errors only from lm-eval's loggers, no prints, and no progress bars unless asked for."""
    from lm_eval import evaluator
    from tqdm import std

    original = std.tqdm.__init__

    def without_bar(self: std.tqdm, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "disable": True})

    harness = logging.getLogger("lm_eval")
    hflm = logging.getLogger("lm_eval.models.huggingface")
    levels = harness.level, hflm.level
    log = _HarnessLog()
    harness.setLevel(logging.ERROR)
    hflm.setLevel(logging.WARNING)
    hflm.addFilter(log)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            # Outside a repository git complains on the terminal, and the hash is not used here.
            stack.enter_context(_replaced(evaluator, "get_git_commit_hash", lambda: ""))
            if not progress:  # HFLM passes disable=False itself, so its arguments cannot do this
                stack.enter_context(_replaced(std.tqdm, "__init__", without_bar))
            yield log
    finally:
        hflm.removeFilter(log)
        harness.setLevel(levels[0])
        hflm.setLevel(levels[1])


def _as_float(value: Any) -> float:
    """NaN for what is not a number: lm-eval writes "N/A" where there is no standard error."""
    return float(value) if isinstance(value, int | float) else math.nan


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
