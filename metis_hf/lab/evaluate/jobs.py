"""One task of one checkpoint: whether its result is there already, and how it comes to be."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis_hf.lab.checkpoint import Checkpoint
from metis_hf.lab.evaluate import store
from metis_hf.lab.evaluate.models import own_schemes
from metis_hf.lab.evaluate.plan import LOSS_TASK, EvaluationPlan, HeldOutText, PlannedTask
from metis_hf.lab.evaluate.results import EvalResult
from metis_hf.lab.evaluate.run import evaluate_model, held_out_loss
from metis_hf.shared.records import environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Job:
    """One row of the table: a checkpoint in a precision, with its tokenizer.

    Attributes:
        checkpoint: what is evaluated.
        precision: "scheme" or "dense".
        tokenizer: the checkpoint's, or the one that was asked for.
        weights: SHA-256 of config and weights.
    """

    checkpoint: Checkpoint
    precision: str
    tokenizer: PreTrainedTokenizerBase
    weights: str

    @property
    def file_name(self) -> str:
        """The beginning of its result files' names."""
        converted = self.checkpoint.conversion is not None
        return self.checkpoint.label + (f"-{self.checkpoint.scheme}" if converted else "")

    @property
    def name(self) -> str:
        """For messages."""
        how = self.precision
        if self.checkpoint.conversion is not None and self.precision == "scheme":
            how = f"converted to {self.checkpoint.scheme}"
        return f"{self.checkpoint.label} ({how})"


@dataclass(frozen=True)
class Step:
    """One task of a job.

    A task is evaluated by itself: lm-eval sorts the requests of all tasks that it is given into
    the same batches, and a quantized model's likelihoods depend on what else is in their batch.

    Attributes:
        job: the row.
        task: with its data.
        settings: all that decides the numbers.
        path: of the result file.
        finished: what that file holds, if it is to be used again.
    """

    job: Job
    task: PlannedTask
    settings: dict[str, Any]
    path: Path
    finished: dict[str, Any] | None

    def evaluate(
        self, model: PreTrainedModel, text: HeldOutText | None, *, progress: bool
    ) -> dict[str, Any]:
        """Evaluate the task, write its result file and return what it holds.

        Args:
            model: the job's, loaded.
            text: whose loss is measured, if this is the task of the loss.
            progress: show lm-eval's progress bars.
        """
        start = time.time()
        limit = self.settings["limit"]
        tokenizer = self.job.tokenizer
        result = evaluate_model(
            model,
            tokenizer,
            [self.task.spec],
            include_path=self.task.include_path,
            batch_size=self.settings["batch_size"],
            limit=limit,
            progress=progress,
            per_item=True,
        )
        loss = tokens = None
        if self.task.name == LOSS_TASK and text is not None:
            tokens = text.check(tokenizer, limit)
            loss = held_out_loss(result, LOSS_TASK, tokenizer, text.documents)
        checkpoint = self.job.checkpoint
        ours = {
            "format_version": store.FORMAT_VERSION,
            "label": checkpoint.label,
            "checkpoint": str(checkpoint.place),
            "scheme": checkpoint.scheme,
            "precision": self.job.precision,
            "quantization_config": checkpoint.quantization,
            "held_out_loss": loss,
            "held_out_tokens": tokens,
            "loss_task": LOSS_TASK,
            "batch_size": self.settings["batch_size"],
            "truncated_requests": result.truncated,
            "truncated_tokens": result.truncated_tokens,
            "nonfinite": result.nonfinite,
            "parameters": sum(p.numel() for p in model.parameters()),
            "parameter_dtype": str(model.dtype).removeprefix("torch."),
            "settings": self.settings,
            "environment": environment(model.device),
            "items": result.items,
        }
        record = {**_harness_record(result, checkpoint, time.time() - start), "metis": ours}
        store.save_result(self.path, record)
        return record


def plan_steps(
    job: Job,
    plan: EvaluationPlan,
    out: Path,
    *,
    batch_size: int,
    limit_of: Callable[[str], int | None],
    dtype: str,
    device: str,
    overwrite: bool,
) -> list[Step]:
    """Return the tasks of a job, each with its finished result if there is one.

    Args:
        job: the row.
        plan: the tasks and their data.
        out: directory whose `results/` holds the result files.
        batch_size: sequences per forward pass.
        limit_of: task -> how many of its first items are evaluated; None for all.
        dtype: of the weights, as asked for.
        device: its kind, such as "cuda".
        overwrite: leave finished results aside.

    Raises:
        ValueError: a result file is damaged.
    """
    tokenizer = _tokenizer_fingerprint(job.tokenizer)
    steps = []
    for task in plan.tasks:
        settings = store.settings_of(
            weights=job.weights,
            tokenizer=tokenizer,
            precision=job.precision,
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            limit=limit_of(task.name),
            task=task.name,
            data=task.data,
            conversion=job.checkpoint.conversion,
            own_schemes=own_schemes(job.checkpoint),
        )
        path = store.result_path(out, job.file_name, settings)
        finished = None if overwrite else store.load_result(path, settings)
        if finished is not None:
            finished["metis"] |= {"label": job.checkpoint.label, "scheme": job.checkpoint.scheme}
        steps.append(Step(job, task, settings, path, finished))
    return steps


def _harness_record(result: EvalResult, checkpoint: Checkpoint, seconds: float) -> dict[str, Any]:
    """Return lm-eval's own file, without what only holds on this machine."""
    record = dict(result.harness)
    record.pop("pretty_env_info", None)
    for config in record["configs"].values():
        config.pop("custom_dataset", None)  # the source code of a reader of `data_files`
        source = str(config.get("metadata", {}).get("config_source", ""))
        if "lm_eval/tasks/" in source:
            config["metadata"]["config_source"] = source[source.rindex("lm_eval/tasks/") :]
    return {
        **record,
        "model_source": "metis",
        "model_name": checkpoint.label,
        "model_name_sanitized": re.sub(r"[^\w.-]+", "__", checkpoint.label),
        "total_evaluation_time_seconds": str(seconds),
    }


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the whole tokenizer, wherever it came from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = repr(sorted(tokenizer.get_vocab().items()))
    else:  # each call of the tokenizer sets these two anew
        parts = json.loads(backend.to_str())
        text = json.dumps({k: v for k, v in parts.items() if k not in ("truncation", "padding")})
    special = sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items())
    return hashlib.sha256(f"{text}\n{special}".encode()).hexdigest()
