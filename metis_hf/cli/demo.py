"""`metis-hf demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from metis_hf.cli.options import Imports, fail_with, import_sources, split_names
from metis_hf.lab.compare.sizes import QUICK_DEMO

# How long `--quick` takes, in the words of docs/quickstart.md.
QUICK_TIME = "a minute or two"


def demo(
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per scheme.")] = None,
    schemes: Annotated[
        str, typer.Option(help="Comma-separated; `metis-hf schemes --all` lists them.")
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

    No download, no GPU. Interrupt it and run it again: it goes on where it stopped. This is
    `metis-hf compare --preset demo` in a few options.
    """
    options: dict[str, Any] = {"size": "demo", "seeds": [seed], "schemes": split_names(schemes)}
    if quick:
        options |= QUICK_DEMO
    if steps is not None:
        options["training"] = {**options.get("training", {}), "max_steps": steps}
    sources = import_sources(imports)
    from metis_hf.lab.compare.command import compare_schemes

    out = out or Path("runs") / ("quick" if quick else "demo")
    fail_with(compare_schemes(options, out, imports=sources))
