"""`analyze`: finds the layers of a checkpoint, measures them, and writes the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from metis_hf.lab.analyze import capture
from metis_hf.lab.analyze.analysis import Analysis
from metis_hf.lab.analyze.measurements import Measurements, Request
from metis_hf.lab.analyze.stored_weights import WeightSource, portrait_layers
from metis_hf.lab.store import Store


def analyze(
    models: Sequence[str | Path],
    out: str | Path,
    *,
    text: str | Path | None = None,
    control: str | Path | None = None,
    layers: str | None = None,
    rank: int | None = None,
    sequences: int = 128,
    length: int = 128,
    console: Console | None = None,
) -> Analysis:
    """Analyze a model's weights and, with a text, its activations and gradients.

    Weights are read from safetensors one matrix at a time. With a text, the model is loaded and run
    in micro-batches of 8 sequences; memory then holds the model, a micro-batch, and the rows of at
    most four layers that get a portrait.

    The page exists from the first figure on. Measurements of the same model, text and settings that
    `out` already holds are reused.

    Args:
        models: checkpoint directories or hub names; the first is analyzed, and the last FFNs of
            all are compared.
        out: directory to write: index.html, layers.csv, figures/ with a PNG and a JSON each, and
            measured/, from which an interrupted run resumes.
        text: a UTF-8 file, or JSON lines, see `data.chat`.
        control: a checkpoint trained without Metis, to compare a Metis-trained residual with.
        layers: regular expression, searched in layer names; None takes all.
        rank: directions that Metis splits off; None takes 1.5 %, at least 48, in multiples of 16.
        sequences: maximum number of sequences of the text.
        length: tokens per sequence.
        console: prints progress; None prints nothing.

    Raises:
        FileNotFoundError: a file of a checkpoint, or its tokenizer, is missing.
        ValueError: no layer matches; the text is too short; see `WeightSource` and `capture`.
    """
    if rank is not None and rank < 1:
        raise ValueError(f"rank={rank}; choose at least 1")
    source = WeightSource(models[0])
    names = _matching(source, layers)
    reference = None if control is None else WeightSource(control)
    others = [WeightSource(model) for model in models[1:]]
    result = Analysis(source.checkpoint, control="" if control is None else str(control))
    ids = None
    if text is not None:
        ids = capture.token_ids(source, Path(text), sequences, length)
        result.text = {"file": Path(text).name, "sequences": len(ids), "length": length}
        if len(ids) < sequences:
            result.notes.append(
                f"{text} gives only {len(ids)} sequences of {length} tokens; {sequences} were "
                "requested"
            )
    else:
        result.notes.append("no text was given, so activations and gradients were not measured")
    chosen = portrait_layers(names)
    for name in chosen:
        _check_control(reference, source, name)
    console = console or Console(quiet=True)
    request = Request(source, reference, [source, *others], names, chosen, rank, ids)
    store = Store(out)
    with store.hold():
        work = Measurements(request, store, result, console)
        try:
            with work.progress():
                work.run()
        except KeyboardInterrupt:
            console.print(
                f"interrupted: {Path(out) / 'index.html'} shows the results so far; run the same "
                "command again to continue",
                soft_wrap=True,
            )
            raise
    return result


def _matching(source: WeightSource, layers: str | None) -> list[str]:
    try:
        pattern = re.compile(layers or "")
    except re.error as error:
        raise ValueError(
            f"--layers {layers!r} is not a valid regular expression: {error}"
        ) from None
    names = [name for name in source.names if pattern.search(name)]
    if not names:
        shown = ", ".join(source.names[:6])
        raise ValueError(
            f"layers={layers!r} matches none of the {len(source.names)} layers of "
            f"{source.checkpoint}: {shown}, ..."
        )
    return names


def _check_control(control: WeightSource | None, source: WeightSource, name: str) -> None:
    """Refuse a control that has no layer of the same name and shape."""
    if control is None:
        return
    if name not in control.names:
        raise ValueError(
            f"the control {control.checkpoint} has no layer {name}; give a checkpoint of "
            "the same architecture"
        )
    if control.shape(name) != source.shape(name):
        raise ValueError(
            f"{name} has shape {control.shape(name)} in the control {control.checkpoint} but "
            f"{source.shape(name)} here; give a checkpoint of the same architecture"
        )
