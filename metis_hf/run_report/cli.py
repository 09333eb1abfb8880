"""`metis-hf report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""

    @app.command()
    def report(
        runs: Annotated[
            list[Path],
            typer.Argument(help="Directory of a run; several are compared.", metavar="RUN_DIR..."),
        ],
        out: Annotated[
            Path | None,
            typer.Option(help="The page to write.", show_default="report.html in RUN_DIR"),
        ] = None,
    ) -> None:
        """Make an HTML page of a training run: loss, spectral health, quantization noise."""
        from metis_hf.run_report.page import write_report

        Console().print(str(write_report(runs, out)), soft_wrap=True, highlight=False)
