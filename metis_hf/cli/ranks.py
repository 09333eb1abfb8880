"""`metis-hf ranks`."""

from __future__ import annotations

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
    utf8_file,
)


def ranks(
    model: Model,
    text: Annotated[
        Path,
        typer.Option(
            help="UTF-8 text, or .jsonl file of documents, to calibrate on.", callback=utf8_file
        ),
    ],
    budget: Annotated[
        float,
        typer.Option(help="Budget for extra multiply-adds, in % of those in the three GEMMs."),
    ],
    out: Annotated[Path, typer.Option(help="Output file for the config.")] = Path(
        "metis-ranks.json"
    ),
    scheme: Annotated[
        str, typer.Option(help="Scheme to choose ranks for; it must split operands.")
    ] = "metis",
    limit: Annotated[int, typer.Option(help="Number of calibration sequences.")] = 4,
    length: Length = 256,
    batch: Batch = 2,
    tokens_per_step: TokensPerStep = 8192,
    dtype: Dtype = "float32",
    device: Device = None,
    tokenizer: Tokenizer = None,
    imports: Imports = None,
) -> None:
    """Choose the rank of each layer of a model within a budget.

    Calibrates once on a text and writes a config that `metis-hf fidelity --configs` can measure.
    """
    import_sources(imports)
    from rich.console import Console

    from metis_hf.lab.fidelity.ranks import write_ranks
    from metis_hf.lab.fidelity.subject import ModelAndText
    from metis_hf.shared.devices import device_of

    chosen = str(device_of(device))
    write_ranks(
        ModelAndText(model, text, limit, length, batch, dtype, chosen, tokenizer),
        budget / 100,
        out,
        scheme=scheme,
        tokens=tokens_per_step,
        console=Console(markup=False),
    )
