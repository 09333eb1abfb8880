"""`metis-hf report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from metis_hf.cli.options import Imports, import_sources


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Directory of a run; several are compared.", metavar="RUN_DIR..."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write.", show_default="report.html in RUN_DIR"),
    ] = None,
    imports: Imports = None,
) -> None:
    """Make an HTML page of a training run, or of several side by side.

    It shows loss, spectral health and quantization noise.
    """
    import_sources(imports)
    from rich.console import Console

    from metis_hf.lab.run_report.page import write_report

    Console(markup=False).print(str(write_report(runs, out)), soft_wrap=True, highlight=False)
