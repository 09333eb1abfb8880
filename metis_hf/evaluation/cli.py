"""The command `metis-hf eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_TASKS = "arc_challenge,arc_easy,boolq,lambada_openai,piqa,race,hellaswag"


def register(app: typer.Typer) -> None:
    """Adds `eval` to a command line."""
    app.command(name="eval")(evaluate)


def evaluate(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="Checkpoints, or runs that hold model/ or checkpoint-<step>."),
    ],
    tasks: Annotated[
        str, typer.Option(help="Comma-separated lm-eval tasks; 'none' for the loss alone.")
    ] = DEFAULT_TASKS,
    tasks_dir: Annotated[
        Path | None,
        typer.Option(help="Local data, <task>.jsonl each; no network is used."),
    ] = None,
    loss_text: Annotated[
        Path | None, typer.Option(help="Held-out text, or JSON lines with a text field.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="scheme (as trained), dense, or both: two rows.")
    ] = "scheme",
    batch_size: Annotated[
        str, typer.Option(help="Sequences per forward pass, the same for all; or auto.")
    ] = "auto",
    limit: Annotated[
        int | None, typer.Option(help="Only the first items of each task, for a quick look.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="acc, acc_norm, default, or <task>=<metric>; repeatable."),
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="Row that differences are taken to; default: bf16.")
    ] = None,
    paper: Annotated[
        str | None,
        typer.Option(help="Adds the published rows of gpt2-130m, gpt2-1b1 or llama3-8b."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="For example cuda:1 or cpu.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")
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
) -> None:
    """Evaluate checkpoints on the paper's seven tasks, and print one table.

    A finished result of the same weights, data and settings is used again, and named.
    """
    from rich.console import Console

    from metis_hf.evaluation.command import Options, run_eval

    options = Options(
        tasks=() if tasks == "none" else tuple(_names(tasks)),
        tasks_dir=tasks_dir,
        loss_text=loss_text,
        precision=precision,
        batch_size=_batch_size(batch_size),
        limit=limit,
        device=device,
        dtype=dtype,
        tokenizer=tokenizer,
        overwrite=overwrite,
    )
    run_eval(
        checkpoints,
        options,
        out=out,
        formats_wanted=_names(format),
        metrics=metric or [],
        control=control,
        published=paper,
        console=Console(),
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit():
        raise ValueError(f"batch-size {text!r}; expected auto or a number")
    return int(text)
