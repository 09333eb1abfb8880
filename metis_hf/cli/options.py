"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from metis_hf.shared.texts import utf8_text

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE_OR_MODULE",
        help="Python file or module that registers your own schemes; repeatable.",
    ),
]
Model = Annotated[str, typer.Argument(help="Directory or hub name of a causal language model.")]
Length = Annotated[int, typer.Option("--sequence-length", help="Sequence length in tokens.")]
Batch = Annotated[int, typer.Option(help="Batch size in sequences.")]
TokensPerStep = Annotated[
    int, typer.Option(help="Tokens per training step, for computing the cost of a scheme.")
]
Dtype = Annotated[
    str, typer.Option(help="Dtype of the weights and of the unquantized reference model.")
]
Device = Annotated[
    str | None, typer.Option(help="Device, for example cuda.", show_default="a GPU if available")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Directory of a tokenizer to use instead of the model's own.")
]


def import_sources(sources: Sequence[str] | None) -> list[str]:
    """Import the files and modules given by `--import`; call it before any scheme is looked up.

    Returns:
        The sources as any process can find them: files by absolute path, modules by name.

    Raises:
        ValueError: a source cannot be imported.
    """
    if not sources:
        return []
    from metis_hf.schemes import absolute_source, import_schemes

    for source in sources:
        import_schemes(source)
    return [absolute_source(source) for source in sources]


def fail_with(errors: Sequence[str]) -> None:
    """Print the errors of a command that finished its other work; exit with 1 if there are any."""
    for error in errors:
        typer.echo(f"error: {error}", err=True)
    if errors:
        raise typer.Exit(1)


def split_names(text: str) -> list[str]:
    """Split a comma-separated list; surrounding blanks and empty names are dropped."""
    return [name.strip() for name in text.split(",") if name.strip()]


def utf8_file(path: Path | None) -> Path | None:
    """Return the path of a text after checking that it is UTF-8 (a typer callback)."""
    if path is not None and path.is_file():
        utf8_text(path)
    return path
