"""`analyze`: reads the weights, runs the text, writes figures, their data and the page."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from metis_hf.analysis import capture
from metis_hf.analysis.distortion import Quantizers, Sample
from metis_hf.analysis.portrait import residual_spectra, tensor_line, tensor_portrait, unusable
from metis_hf.analysis.source import StoredWeight, WeightSource, last_ffn, portrait_layers
from metis_hf.analysis.spectra import limit_rows, singular_values, spectrum_data

KINDS = ("weight", "activation", "gradient")


@dataclass
class Analysis:
    """What was measured; JSON-ready but for the paths.

    Attributes:
        model: what was analyzed.
        lines: layer -> kind -> the figures of the table (`tensor_line`).
        portraits: layer -> kind -> everything (`tensor_portrait`).
        residuals: layer -> curves (`residual_spectra`).
        universality: model -> layer, shape and spectrum of its last FFN's weight.
        ranks: layer -> directions that Metis keeps apart.
        text: file, sequences and length of the batch; empty without one.
        control: the other checkpoint, if any.
        notes: what could not be measured, and why.
    """

    model: str
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    portraits: dict[str, dict[str, Any]] = field(default_factory=dict)
    residuals: dict[str, dict[str, Any]] = field(default_factory=dict)
    universality: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    control: str = ""
    notes: list[str] = field(default_factory=list)

    def risk(self, layer: str) -> float:
        """The largest share of singular directions that direct NVFP4 swamps; NaN if unknown."""
        shares = [line.get("nvfp4_swamped", float("nan")) for line in self.lines[layer].values()]
        known = [share for share in shares if share == share]
        return max(known) if known else float("nan")


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
    """Analyzes a model's weights and, with a text, its activations and gradients.

    Weights are read from safetensors one matrix at a time. With a text the model is loaded and run
    in micro-batches of 8 sequences; memory then holds the model, a micro-batch, and the rows of the
    at most four layers that get a portrait.

    Args:
        models: checkpoint directories or hub names; the first is analyzed, the last FFN of all
            of them is compared.
        out: directory to write: index.html, layers.csv, and figures/ with a PNG and a JSON each.
        text: a UTF-8 file.
        control: a checkpoint trained without Metis, to compare a Metis-trained residual with.
        layers: regular expression, searched in layer names; None takes all.
        rank: directions that Metis keeps apart; None takes 1.5 % rounded up to a multiple of 16.
        sequences: at most so many of the text.
        length: tokens of each.
        console: where progress goes.

    Raises:
        FileNotFoundError: a file of a checkpoint, or its tokenizer, is missing.
        ValueError: no layer matches; the text is too short; see `WeightSource` and `capture`.
    """
    from metis_hf.analysis.page import write_report

    if rank is not None and rank < 1:
        raise ValueError(f"rank={rank}; choose at least 1")

    source = WeightSource(models[0])
    names = _matching(source, layers)
    chosen = portrait_layers(names)
    result = Analysis(source.checkpoint, control="" if control is None else str(control))
    reference = None if control is None else WeightSource(control)
    ids = None
    if text is not None:
        ids = capture.token_ids(source, Path(text), sequences, length)
        result.text = {"file": Path(text).name, "sequences": len(ids), "length": length}
        if len(ids) < sequences:
            result.notes.append(
                f"{text} gives {len(ids)} sequences of {length} tokens, {sequences} were asked for"
            )
    else:
        result.notes.append("no text was given, so there are no activations and gradients")
    with _progress(console or Console()) as progress:
        _weights(source, reference, names, chosen, rank, result, progress)
        if ids is not None:
            _activations(source, ids, names, chosen, rank, result, progress)
        for model in progress.track(models, description="last FFN of each model"):
            _last_ffn(WeightSource(model), result)
        for part in (result.portraits, result.residuals):  # as they were chosen: last FFN first
            for name in [name for name in chosen if name in part]:
                part[name] = part.pop(name)
        task = progress.add_task("figures", total=1)
        write_report(result, Path(out))
        progress.advance(task)
    return result


def _matching(source: WeightSource, layers: str | None) -> list[str]:
    try:
        pattern = re.compile(layers or "")
    except re.error as error:
        raise ValueError(f"--layers {layers!r} is no regular expression: {error}") from None
    names = [name for name in source.names if pattern.search(name)]
    if not names:
        shown = ", ".join(source.names[:6])
        raise ValueError(
            f"layers={layers!r} matches none of the {len(source.names)} layers of "
            f"{source.checkpoint}: {shown}, ..."
        )
    return names


def _weights(
    source: WeightSource,
    control: WeightSource | None,
    names: list[str],
    chosen: list[str],
    rank: int | None,
    result: Analysis,
    progress: Progress,
) -> None:
    for name in progress.track(names, description="weights"):
        stored = source.load(name)
        sample = _weight_sample(stored, rank)
        result.ranks[name] = sample.quantizers.split_rank()
        result.lines[name] = {"weight": tensor_line(sample)}
        if name not in chosen:
            continue
        result.portraits[name] = {"weight": tensor_portrait(sample, None)}
        kept = result.ranks[name] if stored.parts is None else len(stored.parts[1])
        curves = residual_spectra(stored, _same_layer(control, stored), kept)
        if curves is not None:
            result.residuals[name] = curves


def _weight_sample(stored: StoredWeight, rank: int | None) -> Sample:
    shape = (stored.weight.shape[0], stored.weight.shape[1])
    return Sample(stored.weight, "weight", Quantizers(stored.name, shape, rank), stored)


def _same_layer(control: WeightSource | None, stored: StoredWeight) -> StoredWeight | None:
    """The control's layer of that name.

    Raises:
        ValueError: it has none, or one of another shape: another model.
    """
    if control is None:
        return None
    if stored.name not in control.names:
        raise ValueError(
            f"the control {control.checkpoint} has no layer {stored.name}; give a checkpoint of "
            "the same architecture"
        )
    other = control.load(stored.name)
    if other.weight.shape != stored.weight.shape:
        raise ValueError(
            f"{stored.name} is {tuple(other.weight.shape)} in the control {control.checkpoint} and "
            f"{tuple(stored.weight.shape)} here; give a checkpoint of the same architecture"
        )
    return other


def _activations(
    source: WeightSource,
    ids: Tensor,
    names: list[str],
    chosen: list[str],
    rank: int | None,
    result: Analysis,
    progress: Progress,
) -> None:
    model = capture.load_model(source)
    kinds = KINDS[1:] if capture.has_loss(model) else KINDS[1:2]
    if len(kinds) == 1:
        result.notes.append(
            f"{type(model).__name__} has no loss on tokens of its own, so there are no gradients"
        )
    task = progress.add_task("activations and gradients", total=len(names) * len(kinds))
    shapes = {name: source.shape(name) for name in names}

    def measure(name: str, kind: str, x: Tensor) -> None:
        line = tensor_line(Sample(x, kind, Quantizers(name, shapes[name], rank)))
        result.lines[name][kind] = line
        progress.advance(task)

    hooks = capture.Capture(set(chosen), measure)
    hooks.run(model, ids, names)
    unseen = [name for name in names if "activation" not in result.lines[name]]
    if unseen:
        result.notes.append(
            f"{len(unseen)} layers saw no token of the first micro-batch (experts, or weights that "
            f"the model applies without a layer of their own): {', '.join(unseen[:3])}"
        )
    del model
    pairs = [(name, kind) for name in chosen for kind in kinds]
    for name, kind in progress.track(pairs, description="portraits"):
        rows = hooks.rows(name, kind)
        if rows is not None:
            sample = Sample(rows, kind, Quantizers(name, shapes[name], rank))
            result.portraits[name][kind] = tensor_portrait(sample, ids.shape[1])


def _last_ffn(source: WeightSource, result: Analysis) -> None:
    name = last_ffn(source.names)
    rows = limit_rows(source.load(name).weight)
    reason = unusable(rows)
    if reason is not None:
        result.notes.append(f"{source.checkpoint}, {name}: {reason}; not among the models compared")
        return
    data = spectrum_data(singular_values(rows), (rows.shape[0], rows.shape[1]))
    result.universality[source.checkpoint] = {"layer": name, "shape": list(rows.shape), **data}


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(bar_width=28),
        TextColumn("{task.completed:>4}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def figure_data(data: Any) -> Any:
    """Return data as a figure's file holds it: six digits, NaN and infinity as null."""
    if isinstance(data, dict):
        return {key: figure_data(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [figure_data(value) for value in data]
    if isinstance(data, float):
        value = float(f"{data:.6g}")  # enough for any figure, and a third of the size
        return value if math.isfinite(value) else None
    return data


def write_csv(path: Path, result: Analysis) -> None:
    """The table of layers: one line per layer and tensor."""
    columns = (
        "fraction",
        "energy",
        "noise_fraction",
        "stable_rank",
        "nvfp4_sqnr_db",
        "nvfp4_zeroed",
        "nvfp4_swamped",
        "metis_sqnr_db",
        "metis_zeroed",
        "metis_swamped",
        "note",
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("layer", "tensor", "rows", "columns", "risk", *columns))
        for name in sorted(result.lines, key=result.risk, reverse=True):
            for kind, line in result.lines[name].items():
                risk = f"{result.risk(name):.4f}"
                cells = (line.get(column, "") for column in columns)
                writer.writerow((name, kind, *line["shape"], risk, *cells))
