"""`metis-hf analyze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from metis_hf.cli.options import Imports, Length, import_sources, utf8_file


def analyze(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL_OR_CHECKPOINT ...",
            help="Directory or hub name; further ones are compared by their last FFN.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory for the page, figures and data.")],
    text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text or JSON lines, for activations and gradients.", callback=utf8_file
        ),
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="The same model trained without Metis.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Regular expression, searched in layer names.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Directions kept apart, instead of 1.5 %, at least 48, in steps of 16."),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many sequences of the text.")] = 128,
    length: Length = 128,
    imports: Imports = None,
) -> None:
    """Show the spectra of a model and what four bits do to them.

    Writes an HTML page, its figures and their data.
    """
    import_sources(imports)
    from rich.console import Console

    from metis_hf.lab.analyze import analyze as run

    console = Console(markup=False)
    run(
        models,
        out,
        text=text,
        control=control,
        layers=layers,
        rank=rank,
        sequences=limit,
        length=length,
        console=console,
    )
    console.print(str(out / "index.html"), soft_wrap=True)
