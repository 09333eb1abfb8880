"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE_OR_MODULE",
        help="Python file or module that registers schemes of yours; repeatable.",
    ),
]


def import_sources(sources: Sequence[str] | None) -> list[str]:
    """Import the files and modules that `--import` names, before anything asks for a scheme.

    Returns:
        The sources as any process finds them: files by their absolute path, modules by name.

    Raises:
        ValueError: a source cannot be imported.
    """
    if not sources:
        return []
    from metis_hf.schemes import absolute_source, import_schemes

    for source in sources:
        import_schemes(source)
    return [absolute_source(source) for source in sources]


def split_names(text: str) -> list[str]:
    """Split a comma-separated list; blanks around names do not count."""
    return [name.strip() for name in text.split(",") if name.strip()]


def device_or_best(device: str | None) -> str:
    """Return the device that was asked for, else the machine's accelerator, else "cpu"."""
    if device is not None:
        return device
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type
