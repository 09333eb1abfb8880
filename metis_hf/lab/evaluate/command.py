"""`metis-hf eval`: checkpoints and dense models through lm-eval, side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from metis_hf.config import MetisConfig
from metis_hf.lab.checkpoint import Checkpoint
from metis_hf.lab.evaluate import formats, store
from metis_hf.lab.evaluate.jobs import Job, Step, plan_steps
from metis_hf.lab.evaluate.models import choose_models
from metis_hf.lab.evaluate.paper import PAPER_TASKS, published_method, shared_methods
from metis_hf.lab.evaluate.plan import (
    CPU_BATCH_SIZE,
    LOSS_TASK,
    EvaluationPlan,
    make_plan,
    probe_batch_size,
)
from metis_hf.lab.evaluate.run import check_tasks
from metis_hf.lab.evaluate.table import Comparison, compare, parse_metrics
from metis_hf.schemes import scheme_info
from metis_hf.shared.devices import device_of
from metis_hf.shared.inputs import digest
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.quiet import quiet
from metis_hf.shared.records import device_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

PAPER_TOKENS = 2048  # more than a request of the paper's tasks has
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
        limits: task -> only its first items; "" stands for all tasks without a limit of their own.
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
    limits: Mapping[str, int] = field(default_factory=dict)
    device: str | None = None
    dtype: str = "auto"
    tokenizer: Path | None = None
    overwrite: bool = False
    conversions: tuple[MetisConfig, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("precision", PRECISIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected {', '.join(known)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}; expected at least 1")
        for conversion in self.conversions:
            for scheme in conversion.schemes:
                scheme_info(scheme)

    def limit_of(self, task: str) -> int | None:
        """Return how many items of a task are evaluated; None for all."""
        return self.limits.get(task, self.limits.get(""))


def evaluate_jobs(
    jobs: Sequence[Job], plan: EvaluationPlan, options: Options, out: Path, console: Console
) -> list[dict[str, Any]]:
    """Evaluate each row task by task; a task's finished result of the same settings stays.

    Args:
        jobs: the rows.
        plan: the tasks and their data.
        options: how.
        out: result files go to `results/` in it.
        console: for one line a task, and progress bars if it is a terminal.

    Returns:
        One record a row, as `store.join_results` makes them.

    Raises:
        ValueError: a result file cannot be used.
    """
    device = device_of(options.device)
    batch_size = _batch_size(jobs, options, device, out, console)
    rows = [
        plan_steps(
            job,
            plan,
            out,
            batch_size=batch_size,
            limit_of=options.limit_of,
            dtype=options.dtype,
            device=device.type,
            overwrite=options.overwrite,
        )
        for job in jobs
    ]
    records = []
    for number, steps in enumerate(rows, start=1):
        progress = f"[{number}/{len(rows)}] {steps[0].job.name}"
        finished = [step.task.name for step in steps if step.finished is not None]
        if finished:
            folder = out / store.FOLDER
            _say(console, f"{progress}: {', '.join(finished)} finished before, taken from {folder}")
        records.append(_evaluate(steps, plan, options, device, progress, console))
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
    evaluated = {"", LOSS_TASK, *options.tasks}
    for what, tasks in (("metric", chosen), ("limit", options.limits)):
        strange = [task for task in tasks if task not in evaluated]
        if strange:
            raise ValueError(f"{what} for {', '.join(strange)}, which is not evaluated")
    checkpoints, control = choose_models(
        paths, options.conversions, precision=options.precision, control=control
    )
    if published is not None:  # refused before the work, not after it
        methods = [(one.scheme, published_method(one.quantization)) for one in checkpoints]
        shared_methods(methods, published)
    # Everything that can be refused is refused before anything is written.
    device_of(options.device)
    plan = make_plan(options.tasks, options.tasks_dir, options.loss_text)
    check_tasks(plan.specs, plan.include_path)
    jobs = _jobs(checkpoints, options, plan, console)
    store.make_folder(out)
    with hold_directory(out):
        records = evaluate_jobs(jobs, plan, options, out, console)
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
            plan.text.check(tokenizer, options.limit_of(LOSS_TASK))
        precisions = checkpoint.precisions(options.precision)
        if options.precision == "both" and len(precisions) == 1 and not options.conversions:
            _say(
                console, f"{checkpoint.label}: {checkpoint.scheme}, one evaluation is all there is"
            )
        weights = checkpoint.fingerprint()
        jobs += [Job(checkpoint, precision, tokenizer, weights) for precision in precisions]
    return jobs


def _check_vocabulary(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose tokens the model does not embed, or that has no prefix token.

    Added tokens may stay unused.
    """
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if prefix is None:
        raise ValueError(
            f"the tokenizer of {checkpoint.label} ({tokenizer.name_or_path}) has neither a BOS nor "
            "an EOS token, one of which lm-eval puts before each text; set "
            "tokenizer.eos_token and save it, or name another with --tokenizer"
        )
    highest = max(tokenizer.vocab_size - 1, prefix)
    known = getattr(checkpoint.config().get_text_config(), "vocab_size", None)
    if known is not None and highest >= known:
        raise ValueError(
            f"the tokenizer of {checkpoint.label} ({tokenizer.name_or_path}) gives tokens up to "
            f"{highest}, and the model knows {known}: they do not belong together; save the "
            "model's own tokenizer beside it, or name it with --tokenizer"
        )


def _batch_size(
    jobs: Sequence[Job], options: Options, device: torch.device, out: Path, console: Console
) -> int:
    """Return the one asked for, or one that fits the largest of the models."""
    if options.batch_size is not None:
        return options.batch_size
    if device.type == "cpu":
        return CPU_BATCH_SIZE
    largest = max(
        jobs, key=lambda job: sum(f.stat().st_size for f in job.checkpoint.weight_files())
    )

    config = largest.checkpoint.config()
    tokens = longest_sequence(config, options)

    def probe() -> int:
        with quiet():
            model = largest.checkpoint.load(largest.precision, options.dtype, device)
        return probe_batch_size(model, tokens)

    shorter = [tokens] if tokens < _context(config) else []
    models = digest(
        largest.weights, largest.precision, options.dtype, device_name(device), *shorter
    )
    size, known = store.known_batch_size(out, models, probe, again=options.overwrite)
    if known:
        file = out / store.BATCH_SIZES
        _say(console, f"batch size {size}, as it was chosen before ({file}); else --batch-size N")
    return size


def _evaluate(
    steps: Sequence[Step],
    plan: EvaluationPlan,
    options: Options,
    device: torch.device,
    progress: str,
    console: Console,
) -> dict[str, Any]:
    """Evaluate what is missing of a row, and return the row's record."""
    model = None
    results = []
    for step in steps:
        result = step.finished
        if result is None:
            start = time.perf_counter()
            if model is None:
                with quiet():
                    model = step.job.checkpoint.load(step.job.precision, options.dtype, device)
            _say(console, f"{progress}: {step.task.name}")
            result = step.evaluate(model, plan.text, progress=console.is_terminal)
            seconds = time.perf_counter() - start
            _say(console, f"{progress}: {step.task.name} took {seconds:.0f} s, {step.path}")
        results.append(result)
    return store.join_results(results)


def longest_sequence(config: PreTrainedConfig, options: Options) -> int:
    """Return the most tokens of a sequence that a batch size must allow for.

    The windows of a held-out text are as long as the model's context, and so may be the requests of
    tasks that are not known; those of the paper's tasks are shorter than `PAPER_TOKENS`.
    """
    known = options.loss_text is None and set(options.tasks) <= set(PAPER_TASKS)
    context = _context(config)
    return min(context, PAPER_TOKENS) if known else context


def _context(config: PreTrainedConfig) -> int:
    """Return the longest sequence in tokens, as HFLM finds it."""
    config = config.get_text_config()
    names = ("n_positions", "max_position_embeddings", "n_ctx")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 2048)


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
