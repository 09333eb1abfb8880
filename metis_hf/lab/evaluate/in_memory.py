"""Evaluate a model in memory with lm-eval, during or after training.

All evaluations go through `evaluate_model`. It restores the random state, the training modes and
the model's config, loads only the task folders it needs, and prints nothing. lm-eval's own caches
stay off, because their keys contain neither the model nor the data.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from metis_hf.lab.evaluate import isolation
from metis_hf.lab.evaluate.results import EvalResult
from metis_hf.lab.evaluate.tasks import TaskSpec, import_lm_eval, task_manager

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    log_samples: bool = False,
) -> EvalResult:
    """Run lm-eval on a model in memory, without side effects on the model or the random state.

    Log-probabilities are computed in float32. Forward passes run under the caller's
    `torch.autocast`, if any. Sequences are padded on the right without a mask, which is exact for
    causal attention. A quantizer whose scale spans the batch sees the padding, however: results of
    quantized models can depend on `batch_size`, and on the other tasks of the call, whose requests
    lm-eval puts into the same batches. Keep both fixed within a comparison.

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
        log_samples: Keep the model's answers to each document.

    Raises:
        ImportError: If lm_eval is not installed.
        ValueError: If there are no tasks or one has an unknown name.
    """
    lm_eval = import_lm_eval()
    from metis_hf.lab.evaluate.harness import MetisLM

    if not tasks:
        raise ValueError("tasks is empty; name at least one")
    if tokenizer.pad_token is None:  # HFLM will set or add one
        tokenizer = copy.deepcopy(tokenizer)
    device_type = model.device.type
    autocast = torch.is_autocast_enabled(device_type)
    with (
        # Every rank computes everything, but lm-eval keeps the result on local rank 0 only, and it
        # forks a process per core for the bootstrap by default.
        mock.patch.dict(os.environ, DISABLE_MULTIPROC="1", LOCAL_RANK="0"),
        isolation.quiet_harness(progress),
        isolation.preserve_random_state(device_type),
        isolation.preserve_model(model),
    ):
        manager = task_manager(tasks, include_path)
        lm = MetisLM(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=max_length,
            # HFLM turns off an outer autocast unless it gets the dtype.
            mixed_precision_dtype=torch.get_autocast_dtype(device_type) if autocast else None,
        )
        raw = lm_eval.simple_evaluate(
            model=lm,
            tasks=list(tasks),
            task_manager=manager,
            batch_size=batch_size,
            limit=limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=log_samples,
        )
    samples = raw.pop("samples", {})
    harness = _plain(raw)
    _mark_nan(harness, lm.nonfinite)
    return EvalResult(harness, samples, lm.truncated, lm.truncated_tokens, dict(lm.nonfinite))


def _mark_nan(harness: dict[str, Any], nonfinite: Mapping[str, int]) -> None:
    """Set every metric of tasks with NaN likelihoods, and of their groups, to NaN, in place."""
    bad, groups = set(nonfinite), harness.get("group_subtasks", {})
    # Groups may be nested, and the outer one is listed first.
    while around := {name for name in groups.keys() - bad if bad & set(groups[name])}:
        bad |= around
    for section in ("results", "groups"):
        for task, values in harness.get(section, {}).items():
            for key, value in values.items():
                if task in bad and "," in key and isinstance(value, int | float):
                    values[key] = math.nan


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, str | int | float | bool | None) else str(value)
