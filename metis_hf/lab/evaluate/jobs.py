"""Evaluate one task of one row, or find its finished result.

Each task is evaluated separately: in one call, lm-eval would put requests of all tasks into the
same batches, and a quantized model's likelihoods depend on the rest of the batch. An evaluation
writes lm-eval's own files, `results_<time>.json` (with the additional key `metis`) and
`samples_<task>_<time>.jsonl`, and a record in the store with its settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis_hf.lab.checkpoint import Checkpoint
from metis_hf.lab.evaluate.held_out import LOSS_TASK, HeldOutText, held_out_loss
from metis_hf.lab.evaluate.in_memory import evaluate_model
from metis_hf.lab.evaluate.results import right_items
from metis_hf.lab.evaluate.table import row_name
from metis_hf.lab.evaluate.tasks import PlannedTask
from metis_hf.lab.store import DamagedRecord, Store, source_digest, task_key
from metis_hf.schemes import source_digests
from metis_hf.shared.records import environment, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RESULTS = "results"  # the folder of lm-eval's files in the output directory
FINISHED = "finished"  # the folder of the store's records
# The code that decides the numbers, in addition to the numerics.
_SOURCE = ("../checkpoint.py", "harness.py", "held_out.py", "in_memory.py", "tasks.py")


@dataclass(frozen=True)
class Job:
    """One row of the table: a checkpoint in a precision, with its tokenizer."""

    checkpoint: Checkpoint
    precision: str  # "scheme" or "dense"
    tokenizer: PreTrainedTokenizerBase  # the checkpoint's, or the one that was asked for
    weights: str  # SHA-256 of config and weights

    @property
    def name(self) -> str:
        """The row's name."""
        one = self.checkpoint
        return row_name(one.label, one.scheme, self.precision, converted=one.conversion is not None)

    def step(self, task: PlannedTask, **chosen: Any) -> Step:
        """Return one task of the row.

        `chosen` are dtype of the weights, type of device, batch_size (a tensor scale spans the
        batch) and limit (of the task's documents; None for all).
        """
        one = self.checkpoint
        settings = {
            "weights_sha256": self.weights,
            "tokenizer_sha256": tokenizer_digest(self.tokenizer),
            "precision": self.precision,
            "conversion": None if one.conversion is None else one.conversion.to_dict(),
            "own_schemes": own_schemes(one),
            "task": task.name,
            "data": task.data,
            "lm_eval": version("lm_eval"),
        }
        return Step(self, task, settings | chosen)


@dataclass(frozen=True)
class Step:
    """One task of a job."""

    job: Job
    task: PlannedTask
    settings: dict[str, Any]  # everything that decides the numbers

    @property
    def key(self) -> str:
        """The digest of the settings and of the code that decides the numbers."""
        return task_key(_source_digest(), self.settings)

    @property
    def record_name(self) -> str:
        """The name of the store's record, which differs for other settings."""
        task = re.sub(r"[^\w.-]+", "-", self.task.name)
        return f"{FINISHED}/{task}-{self.key}"

    def find(self, store: Store) -> dict[str, Any] | None:
        """Return the finished result as `read_result` gives it, or None."""
        files = store.get(self.record_name, self.key)
        paths = [store.directory / name for name in files["files"]] if files else []
        if not paths or not all(path.is_file() for path in paths):
            return None
        try:
            found = read_result(*paths)
        except ValueError as error:
            raise DamagedRecord(
                f"{error}; delete the file, or evaluate again with --overwrite"
            ) from None
        # Labels depend on the other checkpoints that are evaluated.
        one = self.job.checkpoint
        found["metis"] |= {"label": one.label, "scheme": one.scheme}
        return found

    def evaluate(
        self, model: PreTrainedModel, text: HeldOutText | None, store: Store, *, progress: bool
    ) -> dict[str, Any]:
        """Evaluate the task, write its files and return the result as `read_result` gives it."""
        from lm_eval.loggers import EvaluationTracker

        folder = store.directory / RESULTS
        tracker = EvaluationTracker(output_path=str(folder))
        limit, tokenizer = self.settings["limit"], self.job.tokenizer
        result = evaluate_model(
            model,
            tokenizer,
            [self.task.spec],
            include_path=self.task.include_path,
            batch_size=self.settings["batch_size"],
            limit=limit,
            progress=progress,
            log_samples=True,
        )
        loss = tokens = None
        if self.task.name == LOSS_TASK and text is not None:
            tokens = text.check(tokenizer, limit)
            loss = held_out_loss(result, LOSS_TASK, tokenizer, text.documents)
        one = self.job.checkpoint
        ours = {
            "label": one.label,
            "scheme": one.scheme,
            "precision": self.job.precision,
            "quantization_config": one.quantization,
            "settings": self.settings,
            "environment": environment(model.device),
            "held_out_loss": loss,
            "held_out_tokens": tokens,
            "truncated_requests": result.truncated,
            "truncated_tokens": result.truncated_tokens,
            "nonfinite": result.nonfinite,
        }
        config = tracker.general_config_tracker
        named = {"pretrained": re.sub(r"[^\w.-]+", "-", self.job.name)}
        config.log_experiment_args("metis", named, None, None, False)
        tracker.save_results_aggregated({**result.harness, "metis": ours}, result.samples)
        for task, samples in result.samples.items():
            tracker.save_results_samples(task, samples)
        end, folder = getattr(tracker, "date_id", ""), folder / str(config.model_name_sanitized)
        files = [folder / f"results_{end}.json"]
        files += [folder / f"samples_{task}_{end}.jsonl" for task in result.samples]
        try:  # lm-eval only logs write errors, at a level that is not shown
            found = read_result(*files)
        except (OSError, ValueError) as error:
            raise OSError(
                f"the result of {self.task.name} could not be written to {folder} ({error}); the "
                "disk may be full. Earlier results are kept; run the same command again to "
                "continue"
            ) from None
        names = [str(path.relative_to(store.directory)) for path in files]
        store.put(self.record_name, self.key, {"files": names, "settings": self.settings})
        return found


def read_result(results: Path, *samples: Path) -> dict[str, Any]:
    """Read lm-eval's files of one evaluation, `results_<time>.json` with the key `metis`.

    Returns:
        The results, and under `items` task -> metric -> one digit per document, for metrics that
        are 0 or 1 for each document.

    Raises:
        ValueError: a file is truncated or holds something else.
    """
    record = read_json(results)
    if not isinstance(record, dict) or not {"results", "n-samples", "metis"} <= record.keys():
        raise ValueError(f"{results} is not a result of metis-hf eval")
    items = {}
    end = results.stem.removeprefix("results_")
    for path in samples:
        task = path.stem.removeprefix("samples_").removesuffix(f"_{end}")
        try:
            documents = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
            right = right_items(documents)
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is truncated or damaged ({error})") from None
        count = {one["doc_id"] for one in documents}
        if len(count) != record["n-samples"][task]["effective"]:
            raise ValueError(f"{path} is truncated: it contains only {len(count)} documents")
        if task not in record["metis"]["nonfinite"]:
            items[task] = right
    return {**record, "items": items}


@cache
def _source_digest() -> str:
    return source_digest(*(Path(__file__).parent / name for name in _SOURCE))


def own_schemes(checkpoint: Checkpoint) -> dict[str, str]:
    """Return name -> SHA-256 of a checkpoint's schemes and format from outside this package."""
    metis = checkpoint.metis
    return {} if metis is None else source_digests(metis.schemes, metis.format)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer's contents, whatever its source."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = repr(sorted(tokenizer.get_vocab().items()))
    else:  # calls of the tokenizer change these two
        parts = json.loads(backend.to_str())
        text = json.dumps({k: v for k, v in parts.items() if k not in ("truncation", "padding")})
    special = sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items())
    return hashlib.sha256(f"{text}\n{special}".encode()).hexdigest()
