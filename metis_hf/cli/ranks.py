"""`metis-hf ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from metis_hf.cli.options import Imports, device_or_best, import_sources, utf8_file


def ranks(
    model: Annotated[str, typer.Argument(help="Directory or hub name of a causal language model.")],
    text: Annotated[
        Path,
        typer.Option(
            help="UTF-8 text, or .jsonl of documents, to calibrate on.", callback=utf8_file
        ),
    ],
    budget: Annotated[
        float, typer.Option(help="Multiply-adds beyond the three GEMMs, in % of theirs.")
    ],
    out: Annotated[Path, typer.Option(help="File for the config.")] = Path("metis-ranks.json"),
    scheme: Annotated[str, typer.Option(help="A scheme that splits operands.")] = "metis",
    limit: Annotated[int, typer.Option(help="Sequences of the text.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences of a batch.")] = 2,
    tokens_per_step: Annotated[
        int, typer.Option(help="Tokens that the cost of a training step is counted for.")
    ] = 8192,
    dtype: Annotated[str, typer.Option(help="Of the weights and the exact model.")] = "float32",
    device: Annotated[
        str | None, typer.Option(help='As "cuda".', show_default="a GPU if there is one")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory of another tokenizer than the model's own.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Choose the rank of each layer of a model within a budget.

    Calibrates once, on a text, and writes a config that `metis-hf fidelity --configs` measures.
    """
    import_sources(imports)
    from rich.console import Console

    from metis_hf.lab.fidelity.ranks import write_ranks
    from metis_hf.lab.fidelity.subject import ModelAndText

    device = device_or_best(device)
    write_ranks(
        ModelAndText(model, text, limit, length, batch, dtype, device, tokenizer),
        budget / 100,
        out,
        scheme=scheme,
        tokens=tokens_per_step,
        console=Console(markup=False),
    )
