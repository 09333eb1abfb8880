"""`metis-hf eval`: evaluate checkpoints and dense models side by side with lm-eval."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch.nn import functional as F

from metis_hf.config import MetisConfig
from metis_hf.data.perplexity import prefix_token
from metis_hf.lab.checkpoint import Checkpoint
from metis_hf.lab.evaluate import formats
from metis_hf.lab.evaluate.held_out import LOSS_TASK, HeldOutText, read_text
from metis_hf.lab.evaluate.jobs import RESULTS, Job
from metis_hf.lab.evaluate.models import choose_models
from metis_hf.lab.evaluate.paper import PAPER_TASKS, published_method, shared_methods
from metis_hf.lab.evaluate.table import Comparison, compare, parse_metrics
from metis_hf.lab.evaluate.tasks import PlannedTask, plan_tasks
from metis_hf.lab.store import Store
from metis_hf.shared.devices import device_of
from metis_hf.shared.inputs import digest
from metis_hf.shared.quiet import quiet
from metis_hf.shared.records import device_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PAPER_TOKENS = 2048  # upper bound of request lengths in the paper's tasks
# A CPU gains nothing from more, and the logits of 8 sequences of 1024 GPT-2 tokens take 1.6 GB.
CPU_BATCH_SIZE = 8
MAX_BATCH_SIZE = 256
FORMATS = {
    "md": ("table.md", formats.markdown),
    "tex": ("table.tex", formats.latex),
    "csv": ("table.csv", formats.as_csv),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an evaluation; the same for all checkpoints of a command."""

    tasks: tuple[str, ...] = PAPER_TASKS  # in the order of the columns
    tasks_dir: Path | None = None  # folder of local tasks; None lets lm-eval fetch their data
    loss_text: Path | None = None  # held-out text, plain or JSON lines
    precision: str = "scheme"  # "scheme", "dense" or "both"
    batch_size: int | None = None  # None: 8 on a CPU, else the largest power of two that fits
    limits: Mapping[str, int] = field(default_factory=dict)  # as `parse_limits` gives them
    device: str | None = None  # None takes the accelerator, if any
    dtype: str = "auto"  # of the weights; "auto" as saved
    tokenizer: Path | None = None  # for all checkpoints, in place of their own
    overwrite: bool = False  # evaluate finished tasks again
    conversions: tuple[MetisConfig, ...] = ()  # every dense model is converted with each

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}; expected at least 1")

    def limit_of(self, task: str) -> int | None:
        """Return the number of documents of a task that are evaluated; None for all."""
        return self.limits.get(task, self.limits.get(""))


def parse_limits(options: Sequence[str]) -> dict[str, int]:
    """Return `["300", "race=100", ...]` as task -> documents; "" stands for all other tasks.

    Raises:
        ValueError: a limit that is no number of documents.
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
    """Evaluate, print the table, and write result files and the table in some of `FORMATS`.

    See `choose_models` for `paths` and `control`, `parse_metrics` for `metrics`. `published` is the
    paper's model whose rows are added.

    Raises:
        FileNotFoundError, ValueError: something cannot be evaluated as asked.
        OSError: a result cannot be written.
    """
    unknown = [name for name in formats_wanted if name not in FORMATS]
    if unknown:
        raise ValueError(f"unknown format {', '.join(unknown)}; choose from {', '.join(FORMATS)}")
    chosen = parse_metrics(metrics)
    evaluated = {"", LOSS_TASK, *options.tasks}
    for what, tasks in (("metric", chosen), ("limit", options.limits)):
        strange = [task for task in tasks if task not in evaluated]
        if strange:
            raise ValueError(f"there is a {what} for {', '.join(strange)}, which is not evaluated")
    checkpoints, control = choose_models(
        paths, options.conversions, precision=options.precision, control=control
    )
    if published is not None:  # fail before the work
        methods = [(one.scheme, published_method(one.quantization)) for one in checkpoints]
        shared_methods(methods, published)
    # All checks run before anything is written.
    device = device_of(options.device)
    if not options.tasks and options.loss_text is None:
        raise ValueError("nothing to evaluate; give --tasks or --text")
    text = None if options.loss_text is None else read_text(options.loss_text)
    planned = plan_tasks(options.tasks, options.tasks_dir)
    jobs = _jobs(checkpoints, options, text, console)
    try:
        (out / RESULTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{out} cannot be written to ({error.strerror}); choose another directory with --out"
        ) from None
    store = Store(out)
    with store.hold():
        planned = [*([] if text is None else [text.task()]), *planned]
        records = _evaluate(jobs, planned, text, options, device, store, console)
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
    checkpoints: Sequence[Checkpoint],
    options: Options,
    text: HeldOutText | None,
    console: Console,
) -> list[Job]:
    jobs = []
    for checkpoint in checkpoints:
        checkpoint.check(options.precision)
        tokenizer = checkpoint.tokenizer(options.tokenizer)
        name = f"{checkpoint.label} ({tokenizer.name_or_path})"
        prefix_token(tokenizer, checkpoint.config(), name, "--tokenizer")  # lm-eval prepends it
        if text is not None:
            text.check(tokenizer, options.limit_of(LOSS_TASK))
        precisions = checkpoint.precisions(options.precision)
        if options.precision == "both" and len(precisions) == 1 and not options.conversions:
            _say(
                console,
                f"{checkpoint.label}: {checkpoint.scheme} can be evaluated in only one precision",
            )
        weights = checkpoint.fingerprint()
        jobs += [Job(checkpoint, precision, tokenizer, weights) for precision in precisions]
    return jobs


def _evaluate(
    jobs: Sequence[Job],
    tasks: Sequence[PlannedTask],
    text: HeldOutText | None,
    options: Options,
    device: torch.device,
    store: Store,
    console: Console,
) -> list[list[dict[str, Any]]]:
    """Return the results of each job by task, evaluating the tasks that are not finished."""
    batch_size = _batch_size(jobs, options, device, store, console)
    chosen = {"dtype": options.dtype, "device": device.type, "batch_size": batch_size}
    rows = []
    for number, job in enumerate(jobs, start=1):
        progress = f"[{number}/{len(jobs)}] {job.name}"
        steps = [job.step(task, limit=options.limit_of(task.name), **chosen) for task in tasks]
        found = [None if options.overwrite else step.find(store) for step in steps]
        finished = [step.task.name for step, result in zip(steps, found) if result is not None]
        if finished:
            folder = store.directory / RESULTS
            _say(
                console,
                f"{progress}: {', '.join(finished)} already finished; using results in {folder}",
            )
        model, results = None, []
        for step, result in zip(steps, found):
            if result is None:
                start = time.perf_counter()
                if model is None:
                    with quiet():
                        model = job.checkpoint.load(job.precision, options.dtype, device)
                _say(console, f"{progress}: {step.task.name}")
                result = step.evaluate(model, text, store, progress=console.is_terminal)
                seconds = time.perf_counter() - start
                _say(console, f"{progress}: {step.task.name} took {seconds:.0f} s")
            results.append(result)
        rows.append(results)
    return rows


def _batch_size(
    jobs: Sequence[Job], options: Options, device: torch.device, store: Store, console: Console
) -> int:
    """Return the requested batch size, or one that fits the largest model."""
    if options.batch_size is not None:
        return options.batch_size
    if device.type == "cpu":
        return CPU_BATCH_SIZE
    largest = max(
        jobs, key=lambda job: sum(f.stat().st_size for f in job.checkpoint.weight_files())
    )
    tokens = longest_sequence(largest.checkpoint.config(), options)
    # Keep the choice: another size changes the numbers, and finished results would not be found.
    key = digest(largest.weights, largest.precision, options.dtype, device_name(device), tokens)
    name = f"batch_size-{key}"
    known = None if options.overwrite else store.get(name, key)
    if known is not None:
        where = store.path(name)
        _say(console, f"batch size {known['size']}, as chosen in an earlier run ({where})")
        return int(known["size"])
    with quiet():
        model = largest.checkpoint.load(largest.precision, options.dtype, device)
    size = largest_batch_size(model, tokens)
    store.put(name, key, {"size": size})
    return size


def largest_batch_size(model: PreTrainedModel, tokens: int) -> int:
    """Return the largest power of two, at most 256, of sequences that fit into memory."""
    size = MAX_BATCH_SIZE
    while size > 1:
        try:
            with torch.no_grad():
                ids = torch.ones(size, tokens, dtype=torch.long, device=model.device)
                F.log_softmax(model(ids, use_cache=False).logits, dim=-1, dtype=torch.float32)
            break
        except torch.OutOfMemoryError:
            size //= 2
        finally:
            torch.accelerator.empty_cache()
    return size


def longest_sequence(config: PreTrainedConfig, options: Options) -> int:
    """Return the length in tokens of the longest sequence that the batch size must allow for.

    Windows of a held-out text are as long as the model's context; requests of unknown tasks may be.
    Requests of the paper's tasks are shorter than `PAPER_TOKENS`.
    """
    config = config.get_text_config()
    names = ("n_positions", "max_position_embeddings", "n_ctx")  # in HFLM's order
    context = next((getattr(config, name) for name in names if hasattr(config, name)), 2048)
    known = options.loss_text is None and set(options.tasks) <= set(PAPER_TASKS)
    return min(context, PAPER_TOKENS) if known else context


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
