"""`metis-hf export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from metis_hf.commands.options import Imports, import_sources


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a Metis checkpoint.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    format: Annotated[
        Literal["dense", "compressed-tensors", "modelopt"], typer.Option(help="What is written.")
    ] = "dense",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Of what is not packed.")
    ] = "bfloat16",
    low_rank: Annotated[
        Literal["fold", "side-file"], typer.Option(help="Low-rank part of split weights.")
    ] = "fold",
    text: Annotated[Path | None, typer.Option(help="Held-out text to measure the loss on.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="JSON of metrics for the model card.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Write a checkpoint for software without metis_hf.

    Prints what each choice costs, and how to load what was written.
    """
    import_sources(imports)
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from metis_hf.export import export_checkpoint
    from metis_hf.export.report import HEADER, LOSS_HEADER, loss_rows, report_rows

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
        losses = Table(box=SIMPLE)
        for index, title in enumerate(LOSS_HEADER):
            losses.add_column(title, justify="right" if index else "left")
        for cells in loss_rows(report):
            losses.add_row(*cells)
        console.print(losses)
    summary = f"{out}: {report.bytes:,} bytes, {len(report.packed)} layers in NVFP4. Load it:"
    for lines in (summary, report.loading):  # a path is never broken into lines
        console.print(lines, soft_wrap=True, markup=False, highlight=False)
