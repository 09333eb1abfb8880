"""`metis-hf eval`: checkpoints and dense models through lm-eval, side by side."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from metis_hf.config import MetisConfig
from metis_hf.evaluation import formats, store
from metis_hf.evaluation.checkpoints import Checkpoint
from metis_hf.evaluation.models import choose_models, own_schemes
from metis_hf.evaluation.paper import PAPER_TASKS, published_method, shared_methods
from metis_hf.evaluation.plan import (
    CPU_BATCH_SIZE,
    LOSS_TASK,
    EvaluationPlan,
    make_plan,
    probe_batch_size,
)
from metis_hf.evaluation.results import EvalResult
from metis_hf.evaluation.run import evaluate_model, held_out_loss
from metis_hf.evaluation.table import Comparison, compare, parse_metrics
from metis_hf.schemes import scheme_info
from metis_hf.shared.devices import device_of
from metis_hf.shared.quiet import quiet
from metis_hf.shared.records import environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PRECISIONS = ("scheme", "dense", "both")
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = {
    "md": ("table.md", formats.markdown),
    "tex": ("table.tex", formats.latex),
    "csv": ("table.csv", formats.as_csv),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an evaluation; the same for all checkpoints of a command.

    Args:
        tasks: names of lm-eval tasks, in the order of the columns.
        tasks_dir: folder of local task data; None lets lm-eval fetch it.
        loss_text: held-out text, plain or JSON lines.
        precision: "scheme", "dense" or "both".
        batch_size: sequences per forward pass; None takes the largest power of two that fits.
        limit: only the first items of each task.
        device: e.g. "cuda:1"; None takes the accelerator that there is.
        dtype: of the weights; "auto" as saved.
        tokenizer: directory of a tokenizer for all checkpoints, in place of their own.
        overwrite: evaluate again what has a finished result.
        conversions: what every dense model is converted to, one evaluation each; with precision
            "both" the dense model itself is evaluated too. Checkpoints that were trained under a
            scheme stay as they are.
    """

    tasks: tuple[str, ...] = PAPER_TASKS
    tasks_dir: Path | None = None
    loss_text: Path | None = None
    precision: str = "scheme"
    batch_size: int | None = None
    limit: int | None = None
    device: str | None = None
    dtype: str = "auto"
    tokenizer: Path | None = None
    overwrite: bool = False
    conversions: tuple[MetisConfig, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("precision", PRECISIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected {', '.join(known)}")
        for name in ("batch_size", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; expected at least 1")
        for conversion in self.conversions:
            for scheme in (conversion.scheme, *conversion.scheme_pattern.values()):
                scheme_info(scheme)


@dataclass(frozen=True)
class Job:
    """One evaluation: a checkpoint in a precision, with its tokenizer and settings."""

    checkpoint: Checkpoint
    precision: str
    tokenizer: PreTrainedTokenizerBase
    weights: str

    @property
    def file_name(self) -> str:
        """The beginning of its result file's name."""
        converted = self.checkpoint.conversion is not None
        return self.checkpoint.label + (f"-{self.checkpoint.scheme}" if converted else "")

    @property
    def name(self) -> str:
        """For messages."""
        how = self.precision
        if self.checkpoint.conversion is not None:
            how = f"converted to {self.checkpoint.scheme}"
        return f"{self.checkpoint.label} ({how})"


def evaluate_checkpoints(
    checkpoints: Sequence[Checkpoint], options: Options, out: Path, console: Console
) -> list[dict[str, Any]]:
    """Evaluate each checkpoint, or takes its finished result of the same data and settings.

    Everything that can be refused is refused before the first evaluation begins.

    Args:
        checkpoints: as `choose_models` gives them.
        options: how.
        out: result files go to `results/` in it.
        console: for one line an evaluation, and progress bars if it is a terminal.

    Returns:
        One record an evaluation, as written to its file.

    Raises:
        FileNotFoundError, ValueError: a checkpoint, task data, text or result file cannot be used.
    """
    device = device_of(options.device)
    plan = make_plan(options.tasks, options.tasks_dir, options.loss_text)
    jobs = _jobs(checkpoints, options, plan, console)
    store.make_folder(out)
    batch_size = _batch_size(jobs, options, device)
    records = []
    for number, job in enumerate(jobs, start=1):
        settings = store.settings_of(
            weights=job.weights,
            tokenizer=_tokenizer_fingerprint(job.tokenizer),
            precision=job.precision,
            dtype=options.dtype,
            batch_size=batch_size,
            limit=options.limit,
            tasks=plan.tasks,
            data=plan.fingerprints,
            conversion=job.checkpoint.conversion,
            own_schemes=own_schemes(job.checkpoint),
        )
        path = store.result_path(out, job.file_name, settings)
        done = None if options.overwrite else store.load_result(path, settings)
        progress = f"[{number}/{len(jobs)}] {job.name}"
        if done is not None:
            done["metis"]["label"] = job.checkpoint.label
            _say(console, f"{progress}: finished before, taken from {path}")
        else:
            _say(console, f"{progress}: {', '.join(plan.tasks) or 'loss'}")
            start = time.perf_counter()
            done = _evaluate(job, plan, options, settings, device, console)
            store.save_result(path, done)
            _say(console, f"{progress}: {time.perf_counter() - start:.0f} s, {path}")
        records.append(done)
    return records


def run_eval(
    paths: Sequence[str | Path],
    options: Options,
    *,
    out: Path,
    formats_wanted: Sequence[str] = tuple(FORMATS),
    metrics: Sequence[str] = (),
    control: str | None = None,
    published: str | None = None,
    console: Console,
) -> Comparison:
    """Evaluate, print the table and write it.

    Args:
        paths: checkpoints, runs, or names of models of the hub.
        options: how they are evaluated.
        out: directory for result files and tables.
        formats_wanted: some of `FORMATS`; result files are always written.
        metrics: as `parse_metrics` takes them.
        control: the row that differences are taken to: its name, its checkpoint's label, or
            another checkpoint, which gets a row.
        published: the paper's model whose rows are added.
        console: where the table is printed.

    Raises:
        FileNotFoundError, ValueError: something cannot be evaluated as asked.
    """
    unknown = [name for name in formats_wanted if name not in FORMATS]
    if unknown:
        raise ValueError(f"format {', '.join(unknown)}; expected some of {', '.join(FORMATS)}")
    chosen = parse_metrics(metrics)
    strange = [task for task in chosen if task and task not in options.tasks]
    if strange:
        raise ValueError(f"metric for {', '.join(strange)}, which is not evaluated")
    checkpoints, control = choose_models(
        paths, options.conversions, precision=options.precision, control=control
    )
    if published is not None:  # refused before the work, not after it
        methods = [(one.scheme, published_method(one.quantization)) for one in checkpoints]
        shared_methods(methods, published)
    records = evaluate_checkpoints(checkpoints, options, out, console)
    comparison = compare(
        records, options.tasks, metrics=chosen, control=control, published=published
    )
    formats.print_terminal(comparison, console)
    for name in formats_wanted:
        file, writer = FORMATS[name]
        (out / file).write_text(writer(comparison), encoding="utf-8")
        _say(console, str(out / file))
    return comparison


def _jobs(
    checkpoints: Sequence[Checkpoint], options: Options, plan: EvaluationPlan, console: Console
) -> list[Job]:
    jobs = []
    for checkpoint in checkpoints:
        checkpoint.check(options.precision)
        tokenizer = checkpoint.tokenizer(options.tokenizer)
        _check_vocabulary(checkpoint, tokenizer)
        if plan.text is not None:
            plan.text.check(tokenizer, options.limit)
        precisions = checkpoint.precisions(options.precision)
        if options.precision == "both" and len(precisions) == 1 and not options.conversions:
            _say(
                console, f"{checkpoint.label}: {checkpoint.scheme}, one evaluation is all there is"
            )
        weights = checkpoint.fingerprint()
        jobs += [Job(checkpoint, precision, tokenizer, weights) for precision in precisions]
    return jobs


def _check_vocabulary(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose tokens the model does not embed; added tokens may stay unused."""
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    highest = max(tokenizer.vocab_size - 1, -1 if prefix is None else prefix)
    known = getattr(checkpoint.config().get_text_config(), "vocab_size", None)
    if known is not None and highest >= known:
        raise ValueError(
            f"the tokenizer of {checkpoint.label} ({tokenizer.name_or_path}) gives tokens up to "
            f"{highest}, and the model knows {known}: they do not belong together; save the "
            "model's own tokenizer beside it, or name it with --tokenizer"
        )


def _batch_size(jobs: Sequence[Job], options: Options, device: torch.device) -> int:
    """Return the one asked for, or one that fits the largest of the models."""
    if options.batch_size is not None:
        return options.batch_size
    if device.type == "cpu":
        return CPU_BATCH_SIZE
    largest = max(
        jobs, key=lambda job: sum(f.stat().st_size for f in job.checkpoint.weight_files())
    )
    with quiet():
        model = largest.checkpoint.load(largest.precision, options.dtype, device)
    return probe_batch_size(model, _context(model))


def _evaluate(
    job: Job,
    plan: EvaluationPlan,
    options: Options,
    settings: dict[str, Any],
    device: torch.device,
    console: Console,
) -> dict[str, Any]:
    start = time.time()
    with quiet():
        model = job.checkpoint.load(job.precision, options.dtype, device)
    result = evaluate_model(
        model,
        job.tokenizer,
        plan.specs,
        include_path=plan.include_path,
        batch_size=settings["batch_size"],
        limit=options.limit,
        progress=console.is_terminal,
        per_item=True,
    )
    loss = tokens = None
    if plan.text is not None:
        tokens = plan.text.check(job.tokenizer, options.limit)
        loss = held_out_loss(result, LOSS_TASK, job.tokenizer, plan.text.documents)
    checkpoint = job.checkpoint
    ours = {
        "format_version": store.FORMAT_VERSION,
        "label": checkpoint.label,
        "checkpoint": str(checkpoint.place),
        "scheme": checkpoint.scheme,
        "precision": job.precision,
        "quantization_config": checkpoint.quantization,
        "held_out_loss": loss,
        "held_out_tokens": tokens,
        "loss_task": LOSS_TASK,
        "batch_size": settings["batch_size"],
        "truncated_requests": result.truncated,
        "truncated_tokens": result.truncated_tokens,
        "nonfinite": result.nonfinite,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_dtype": str(model.dtype).removeprefix("torch."),
        "settings": settings,
        "environment": environment(),
        "items": result.items,
    }
    seconds = time.time() - start
    return {**_harness_record(result, checkpoint, seconds), "metis": ours}


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


def _context(model: PreTrainedModel) -> int:
    """Longest sequence in tokens, as HFLM finds it."""
    config = model.config.get_text_config()
    names = ("n_positions", "max_position_embeddings", "n_ctx")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 2048)


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the whole tokenizer, wherever it came from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    special = sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items())
    return hashlib.sha256(f"{text}\n{special}".encode()).hexdigest()


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
