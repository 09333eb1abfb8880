"""`metis-hf demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from metis_hf.cli.options import Imports, fail_with, import_sources, split_names
from metis_hf.lab.compare.sizes import QUICK_DEMO

# The duration of `--quick`, worded as in docs/quickstart.md.
QUICK_TIME = "a minute or two"


def demo(
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per scheme.")] = None,
    schemes: Annotated[
        str, typer.Option(help="Comma-separated schemes; `metis-hf schemes --all` lists them.")
    ] = "bf16,nvfp4,nvidia,metis-paper,metis",
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory; default: runs/demo, or runs/quick with --quick."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for data, weights and noise.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Only check that everything works, in {QUICK_TIME}.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Train a small Llama in FP4 four ways and print the comparison.

    Needs no download and no GPU. If interrupted, run the same command again to resume. This is a
    short form of `metis-hf compare --preset demo`.
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
