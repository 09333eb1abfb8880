"""`metis-hf eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from metis_hf.cli.options import Imports, import_sources, split_names

DEFAULT_TASKS = "arc_challenge,arc_easy,boolq,lambada_openai,piqa,race,hellaswag"


def evaluate(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Checkpoint, run directory with model/ or checkpoint-<step>, or hub name.",
        ),
    ],
    scheme: Annotated[
        str | None,
        typer.Option(help="Comma-separated schemes to convert dense models to, one row each."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="JSON file of a MetisConfig, or a checkpoint's config.json, for --scheme."
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Comma-separated lm-eval tasks, or 'none' to measure only the loss.")
    ] = DEFAULT_TASKS,
    tasks_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory with a <task>.jsonl file for each task; the network is not used."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Held-out text to measure the loss on: plain, or JSON lines with a text field."
        ),
    ] = None,
    precision: Annotated[
        Literal["scheme", "dense", "both"],
        typer.Option(
            help="Evaluate as trained or converted, with dense weights, or both in two rows."
        ),
    ] = "scheme",
    batch: Annotated[
        str, typer.Option(help="Batch size in sequences, the same for all models, or auto.")
    ] = "auto",
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluate only this many items of each task, or <task>=<items>; repeatable."
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Metric to show: acc, acc_norm, default, or <task>=<metric>; repeatable."
        ),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(
            help="Row or model to compare the others with; default: the first in bf16, else dense."
        ),
    ] = None,
    paper: Annotated[
        Literal["gpt2-130m", "gpt2-1b1", "llama3-8b"] | None,
        typer.Option(help="Model whose published results are added to the table."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device, for example cuda:1 or cpu.")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Dtype of the weights; auto keeps the saved dtype."),
    ] = "auto",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, for checkpoints that have none.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for results and tables.")] = Path(
        "runs/eval"
    ),
    format: Annotated[
        str, typer.Option(help="Comma-separated table formats, in addition to the result JSON.")
    ] = "md,tex,csv",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Repeat evaluations that are already finished.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Evaluate models on the paper's seven tasks, and print one table.

    Reuses and lists finished results with the same weights, data and settings.
    """
    size = _batch_size(batch)
    import_sources(imports)
    from rich.console import Console

    from metis_hf.lab.evaluate.command import Options, parse_limits, run_eval
    from metis_hf.lab.evaluate.models import read_conversions

    options = Options(
        tasks=() if tasks == "none" else tuple(split_names(tasks)),
        tasks_dir=tasks_dir,
        loss_text=text,
        precision=precision,
        batch_size=size,
        limits=parse_limits(limit or []),
        device=device,
        dtype=dtype,
        tokenizer=tokenizer,
        overwrite=overwrite,
        conversions=read_conversions(split_names(scheme or ""), config),
    )
    run_eval(
        checkpoints,
        options,
        out=out,
        formats_wanted=split_names(format),
        metrics=metric or [],
        control=control,
        published=paper,
        console=Console(markup=False),
    )


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit():
        raise ValueError(f"--batch {text!r}; expected auto or a number")
    return int(text)
