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
            help="Checkpoints, runs that hold model/ or checkpoint-<step>, or names of the hub.",
        ),
    ],
    scheme: Annotated[
        str | None,
        typer.Option(help="Comma-separated; dense models are converted to each before they run."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="JSON of a MetisConfig, or a checkpoint's config.json, for --scheme."),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Comma-separated lm-eval tasks; 'none' for the loss alone.")
    ] = DEFAULT_TASKS,
    tasks_dir: Annotated[
        Path | None,
        typer.Option(help="Local data, <task>.jsonl each; no network is used."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Held-out text, or JSON lines with a text field.")
    ] = None,
    precision: Annotated[
        Literal["scheme", "dense", "both"],
        typer.Option(help="As trained or converted, in dense weights, or both: two rows."),
    ] = "scheme",
    batch: Annotated[
        str, typer.Option(help="Sequences per forward pass, the same for all; or auto.")
    ] = "auto",
    limit: Annotated[
        list[str] | None,
        typer.Option(help="Only the first items of each task, or <task>=<items>; repeatable."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="acc, acc_norm, default, or <task>=<metric>; repeatable."),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(help="Row or model that differences are taken to; default: bf16, dense."),
    ] = None,
    paper: Annotated[
        Literal["gpt2-130m", "gpt2-1b1", "llama3-8b"] | None,
        typer.Option(help="Adds the published rows of a model."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="For example cuda:1 or cpu.")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto: as saved."),
    ] = "auto",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, for checkpoints without.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where results and tables are written.")] = Path(
        "runs/eval"
    ),
    format: Annotated[
        str, typer.Option(help="Files besides the result JSON: md, tex, csv.")
    ] = "md,tex,csv",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Evaluate again what is finished.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Evaluate models on the paper's seven tasks, and print one table.

    Finished results with the same weights, data and settings are reused and listed.
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
