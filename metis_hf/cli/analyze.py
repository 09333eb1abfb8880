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
            help="Model directory or hub name. The first model is analyzed; further models are "
            "compared with it by their last FFN.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory for the page, the figures and their data.")],
    text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text or JSON lines from which activations and gradients are computed.",
            callback=utf8_file,
        ),
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="The same model trained without Metis, for comparison.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Regular expression; only layers with a match in their name are analyzed."
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Number of directions that Metis splits off; default: 1.5 %, at least 48, in "
            "multiples of 16."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of sequences from the text.")] = 128,
    length: Length = 128,
    imports: Imports = None,
) -> None:
    """Show the spectra of a model and what four bits do to them.

    Writes an HTML page with figures and their data.
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
