"""`metis-hf demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from metis_hf.cli.options import Imports, import_sources, split_names
from metis_hf.lab.demo import QUICK_TIME


def demo(
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per scheme.")] = None,
    schemes: Annotated[
        str, typer.Option(help="Comma-separated; `metis-hf schemes` lists them.")
    ] = "bf16,nvfp4,nvidia,metis-paper,metis",
    out: Annotated[
        Path | None,
        typer.Option(help="Where everything is written; default runs/demo, or runs/quick."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"The mechanics only: {QUICK_TIME}.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Train a small Llama in FP4 four ways and print the comparison.

    No download, no GPU. Interrupt it and run it again: it goes on where it stopped.
    """
    import_sources(imports)
    from metis_hf.lab.demo.run import run_demo

    out = out or Path("runs") / ("quick" if quick else "demo")
    run_demo(out=out, steps=steps, schemes=split_names(schemes), seed=seed, quick=quick)
