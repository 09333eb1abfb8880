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

app = typer.Typer(
    help="Train Hugging Face language models in four bits, emulated exactly on any device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    pass


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per scheme.")] = None,
    schemes: Annotated[
        str, typer.Option(help="Comma-separated; `metis-hf schemes` lists them.")
    ] = "bf16,nvfp4,nvidia,metis-paper,metis",
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute, for a first look.")
    ] = False,
) -> None:
    """Train a small Llama in FP4 four ways and print the comparison; no download, no GPU.

    Interrupt it and run it again: it goes on where it stopped.
    """
    from metis_hf.demo import run_demo

    if quick and out == Path("runs/demo"):
        out = Path("runs/quick")
    names = [name.strip() for name in schemes.split(",") if name.strip()]
    run_demo(out=out, steps=steps, schemes=names, seed=seed, quick=quick)


@app.command()
def schemes() -> None:
    """List the registered schemes."""
    from metis_hf.schemes import base

    table = Table()
    for title in ("Scheme", "What it does", "Source"):
        table.add_column(title)
    for name in base.scheme_names():
        info = base.scheme_info(name)
        table.add_row(name, info.summary, info.source)
    Console().print(table)


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
