"""The `metis-hf` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:  # pragma: no cover
    raise SystemExit(f'{error.name} is missing; pip install "metis-hf[eval]"') from error

from metis_hf.analysis.cli import register as register_analyze
from metis_hf.evaluation.cli import register as register_eval
from metis_hf.experiments.compare.cli import register as register_compare
from metis_hf.experiments.demo import FULL_TIME, QUICK_TIME
from metis_hf.run_report.cli import register as register_report
from metis_hf.schemes.cli import register as register_schemes

app = typer.Typer(
    help="Train Hugging Face language models in four bits, emulated exactly on any device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    pass


@app.command(
    help="Train a small Llama in FP4 four ways and print the comparison; no download, no GPU.\n\n"
    f"It takes {FULL_TIME}. Interrupt it and run it again: it goes on where it stopped."
)
def demo(
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per scheme.")] = None,
    schemes: Annotated[
        str, typer.Option(help="Comma-separated; `metis-hf schemes` lists them.")
    ] = "bf16,nvfp4,nvidia,metis-paper,metis",
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"The mechanics only: {QUICK_TIME}.")
    ] = False,
) -> None:
    """Run the demo."""
    from metis_hf.experiments.demo.run import run_demo

    if quick and out == Path("runs/demo"):
        out = Path("runs/quick")
    names = [name.strip() for name in schemes.split(",") if name.strip()]
    run_demo(out=out, steps=steps, schemes=names, seed=seed, quick=quick)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a Metis checkpoint.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    format: Annotated[str, typer.Option(help="dense or compressed-tensors.")] = "dense",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32, for what is not packed.")
    ] = "bfloat16",
    low_rank: Annotated[
        str, typer.Option(help="Low-rank part of split weights: fold or side-file.")
    ] = "fold",
    text: Annotated[Path | None, typer.Option(help="Held-out text to measure the loss on.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="JSON of metrics for the model card.")
    ] = None,
) -> None:
    """Write a checkpoint for software without metis_hf, and print what each choice costs."""
    from metis_hf.export import export_checkpoint
    from metis_hf.export.report import HEADER, report_rows

    report = export_checkpoint(
        checkpoint,
        out,
        format=format,
        dtype=dtype,
        low_rank=low_rank,
        text=text,
        results=results,
    )
    console = Console()
    table = Table(title="Error of the weights against those that the checkpoint represents")
    for index, title in enumerate(HEADER):
        table.add_column(title, justify="left" if index < 2 else "right")
    for cells in report_rows(report):
        table.add_row(*cells)
    console.print(table)
    if report.held_out:
        losses = Table(title="Held-out loss, nats per token")
        for title in ("Model", "Loss", "Difference"):
            losses.add_column(title, justify="left" if title == "Model" else "right")
        for choice, loss in report.held_out.items():
            losses.add_row(choice, f"{loss:.4f}", f"{loss - report.held_out['converted']:+.4f}")
        console.print(losses)
    summary = f"{out}: {report.bytes:,} bytes, {len(report.packed)} layers in NVFP4"
    console.print(summary, soft_wrap=True)  # a path is never broken into lines


register_compare(app)
register_eval(app)
register_report(app)
register_schemes(app)
register_analyze(app)


def main() -> None:
    """Entry point: errors that a user can mend are one line, not a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on where it stopped.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
