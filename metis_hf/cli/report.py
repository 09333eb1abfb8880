"""`metis-hf report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from metis_hf.cli.options import Imports, import_sources


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directory; several runs are shown as a table.", metavar="RUN_DIR..."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write.", show_default="report.html in RUN_DIR"),
    ] = None,
    imports: Imports = None,
) -> None:
    """Make an HTML page of a training run, or a table of several runs.

    The page shows the health of each layer over time and explains what it means for the run.
    """
    import_sources(imports)
    from rich.console import Console

    from metis_hf.lab.health_page import write_report

    Console(markup=False).print(str(write_report(runs, out)), soft_wrap=True, highlight=False)
