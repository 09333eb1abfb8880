"""`metis-hf fidelity`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from metis_hf.cli.options import (
    Batch,
    Device,
    Dtype,
    Imports,
    Length,
    Model,
    Tokenizer,
    TokensPerStep,
    import_sources,
    split_names,
    utf8_file,
)


def fidelity(
    model: Model,
    text: Annotated[
        Path,
        typer.Option(
            help="UTF-8 text, or .jsonl file of documents, that the model was not trained on.",
            callback=utf8_file,
        ),
    ],
    schemes: Annotated[
        str, typer.Option(help='Comma-separated schemes, or "all".')
    ] = "metis,nvfp4-rne,nvidia,quartet2,four-over-six",
    out: Annotated[
        Path | None, typer.Option(help="Output directory.", show_default="runs/fidelity-MODEL")
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Comma-separated ranks at which to measure metis too, for example 8,16,64."
        ),
    ] = "",
    configs: Annotated[
        str, typer.Option(help="Comma-separated JSON files of configs to measure too.")
    ] = "",
    alone: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated schemes whose layers are also quantized one at a time, or "
            '"none".',
            show_default="the first scheme",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(help="Number of sequences: two thirds for the loss, one third for gradients."),
    ] = 48,
    length: Length = 256,
    batch: Batch = 8,
    tokens_per_step: TokensPerStep = 8192,
    dtype: Dtype = "float32",
    device: Device = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed for all noise.", show_default="0, or a config's own"),
    ] = None,
    tokenizer: Tokenizer = None,
    imports: Imports = None,
) -> None:
    """Measure what four-bit schemes do to a model, without training.

    Writes each scheme's loss, divergence, gradient errors and cost, and the most affected layers.
    If interrupted, run the same command again to resume.
    """
    import_sources(imports)
    from rich.console import Console

    from metis_hf.lab.fidelity.measurements import fidelity as run
    from metis_hf.lab.fidelity.scheme_fidelity import narrow_table
    from metis_hf.lab.fidelity.settings import Settings
    from metis_hf.lab.show.table import terminal_table
    from metis_hf.shared.devices import device_of

    chosen = split_names(schemes)
    settings = Settings(
        model=model,
        text=text,
        schemes=None if chosen == ["all"] else tuple(chosen),
        ranks=tuple(_numbers(ranks)),
        configs=tuple(map(Path, split_names(configs))),
        alone=None if alone is None else tuple(_rows(alone) if alone != "none" else ()),
        sequences=limit,
        length=length,
        batch=batch,
        tokens_per_step=tokens_per_step,
        dtype=dtype,
        device=str(device_of(device)),
        seed=seed,
        tokenizer=tokenizer,
    )
    out = out or Path("runs") / f"fidelity-{_name_of(model)}"
    console = Console(markup=False)
    results = run(settings, out, console)
    console.print(terminal_table(*narrow_table(results), title=f"Fidelity of {model}"))
    for result in results:
        if result.note:
            console.print(f"{result.name} was not measured: {result.note}", highlight=False)
        if result.warning:
            console.print(f"{result.name}: {result.warning}", highlight=False)
    console.print(str(out / "index.html"), soft_wrap=True, highlight=False)


def _name_of(model: str) -> str:
    """Return a name for a model's results directory; for `RUN/model`, the name of the run."""
    from metis_hf.lab.model_source import open_model

    return (open_model(model).label if Path(model).is_dir() else Path(model).name).replace("/", "-")


def _rows(text: str) -> list[str]:
    """Split comma-separated row names; "metis, rank 4" is a single name."""
    names: list[str] = []
    for name in split_names(text):
        if names and re.fullmatch(r"rank \d+", name):
            names[-1] += f", {name}"
        else:
            names.append(name)
    return names


def _numbers(text: str) -> list[int]:
    """Parse comma-separated positive integers."""
    names = split_names(text)
    if not all(name.isdigit() and int(name) > 0 for name in names):
        raise ValueError(
            f"--ranks {text}: expected whole numbers of at least 1, separated by commas"
        )
    return [int(name) for name in names]
