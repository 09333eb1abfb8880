"""The plan of a fine-tuning in words, and the table of what came out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoConfig

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model
from metis_hf.conversion.report import ConversionReport
from metis_hf.deploy.source import check_packable
from metis_hf.lab.compare.statistics import t_interval
from metis_hf.lab.cost import meta_model
from metis_hf.lab.finetune.arguments import FinetuneArguments
from metis_hf.lab.finetune.measure import Measured
from metis_hf.lab.show.table import markdown_table
from metis_hf.shared.quiet import no_warnings

HEADER = (
    "Method",
    "Trained",
    "Steps",
    "Loss",
    "Rise %",
    "Recovered %",
    "KL",
    "Exported",
)
_TRAINED_BYTES = 16  # of a parameter that trains: weight, gradient and Adam's two averages, fp32
_PACKED_BITS, _BF16_BITS = 4.5, 16.0


@dataclass(frozen=True)
class Outcome:
    """The result of one method.

    Attributes:
        method: its name; "exact" for the model as it was, or a scheme it was measured in.
        texts: what was measured, by the name of the text.
        trained: parameters that trained.
        steps: of the optimizer.
        directory: of the export; None where nothing is exported.
        code: commit and digest of the code; None where they were not noted.
    """

    method: str
    texts: dict[str, Measured]
    trained: int = 0
    steps: int = 0
    directory: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Outcome:
        """Return what `dataclasses.asdict` has taken apart."""
        texts = {name: Measured(**each) for name, each in values["texts"].items()}
        return cls(**{**values, "texts": texts})


Run = Sequence[Outcome]


def rows_of(runs: Sequence[Run], text: str) -> list[tuple[str, ...]]:
    """Return the rows of a table: rise over the exact model, and how much of ptq's is undone.

    Several runs, of as many seeds, give means; where they differ, with a 95 % interval.

    Args:
        runs: the outcomes of each seed; the first one's methods are shown.
        text: the text that was measured.
    """
    rows: list[tuple[str, ...]] = []
    for one in runs[0]:
        found, exact, ptq = (
            [_of(run, name, text) for run in runs if _has(run, one.method)]
            for name in (one.method, "exact", "ptq")
        )
        plain = one.method == "exact"
        rises = [100 * (x.loss / e.loss - 1) for x, e in zip(found, exact)]
        exported = [each.exported for each in found if each.exported is not None]
        undone = [
            100 * (q.loss - x.loss) / (q.loss - e.loss)
            for x, e, q in zip(found, exact, ptq)
            if one.steps and q.loss != e.loss
        ]
        rows.append(
            (
                one.method,
                _count(one.trained) if one.trained else "",
                str(one.steps) if one.steps else "",
                _mean([each.loss for each in found], ".4f"),
                "" if plain else _mean(rises, "+.2f"),
                _mean(undone, ".0f"),
                "" if plain else _mean([each.kl for each in found], ".4f"),
                _mean(exported, ".4f"),
            )
        )
    return rows


def _has(run: Run, method: str) -> bool:
    return any(outcome.method == method for outcome in run)


def _of(run: Run, method: str, text: str) -> Measured:
    found = next((outcome for outcome in run if outcome.method == method), None)
    return Measured(math.nan) if found is None else found.texts[text]


def _mean(values: Sequence[float], form: str) -> str:
    """Return a mean with its interval; without one where all values are the same, or none."""
    if not values:
        return ""
    if len(set(values)) == 1:
        return format(values[0], form)
    interval = t_interval(values)
    width = form.removeprefix("+")
    return f"{interval.mean:{form}} ± {interval.half_width:{width}}"


def tables_of(runs: Sequence[Run]) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of each text's table, by the name of the text."""
    return {text: rows_of(runs, text) for text in runs[0][0].texts}


def markdown_tables(*runs: Run) -> str:
    """Return one table for each text, under its name where there are several."""
    tables = tables_of(runs)
    titled = len(tables) > 1
    return "\n".join(
        f"**{text}**\n\n" * titled + markdown_table(HEADER, rows) for text, rows in tables.items()
    )


def different_code(run: Run) -> list[str]:
    """Say what measured which methods, a sentence, if it was not the same code for all."""
    found: dict[str, list[str]] = {}
    for outcome in run:
        if outcome.code is not None:
            found.setdefault(outcome.code, []).append(outcome.method)
    said = "; ".join(f"{code}: {', '.join(methods)}" for code, methods in found.items())
    start = "Methods of different code or torch, whose losses differ by that too."
    return [f"{start} {said}."] if len(found) > 1 else []


def _count(parameters: int) -> str:
    """Return a number of parameters in a few characters."""
    return f"{parameters / 1e6:.1f}M" if parameters >= 10**6 else f"{parameters:,}"


def parameters_to_pack(a: FinetuneArguments) -> tuple[int, int]:
    """Return how many parameters the model has and how many are packed; its config is read alone.

    Raises:
        ValueError: layers that the packed layouts cannot hold.
    """
    model = meta_model(AutoConfig.from_pretrained(a.model))
    original = sum(param.numel() for param in model.parameters())
    with no_warnings():
        report = get_metis_model(model, MetisConfig(scheme=a.scheme)).metis_report
    check_packable(model)
    assert isinstance(report, ConversionReport)
    return original, report.converted_params


def describe(
    a: FinetuneArguments, train: int, held_out: Mapping[str, int], steps: int, *, bf16: bool
) -> str:
    """Return what a fine-tuning takes, in lines of text; of the model its config is read alone.

    Args:
        a: the arguments.
        train: sequences to train on.
        held_out: tokens to measure on, by the name of the text.
        steps: of the optimizer.
        bf16: whether training computes in BF16, in which the teacher and the packed base then are.

    Raises:
        ValueError: as of `parameters_to_pack`.
    """
    methods = a.methods()
    original, packed = parameters_to_pack(a)
    computed = 2 if bf16 else 4  # bytes of a number
    whole = original * _BF16_BITS / 8
    export = whole - packed * (_BF16_BITS - _PACKED_BITS) / 8
    tokens = steps * a.global_batch * a.sequence_length
    lines = [
        f"model      {original:,} parameters, {packed:,} of them packed",
        f"export     {export / 2**20:,.0f} MiB; in BF16 {whole / 2**20:,.0f} MiB",
        f"data       {train:,} sequences of {a.sequence_length} tokens to train on",
        *(f"measured   on {count:,} tokens of {name}" for name, count in held_out.items()),
    ]
    trains = [method for method in methods if method != "ptq"]
    if trains:
        seen = tokens / (train * a.sequence_length)
        lines.append(
            f"training   {steps:,} steps, {tokens:,} tokens, each sequence {seen:.1f} times"
        )
    if {"qat", "qad"} & set(trains):
        teacher = f", and {computed * original / 2**20:,.0f} MiB for qad's teacher" * (
            "qad" in trains
        )
        lines.append(
            f"memory     {_TRAINED_BYTES * original / 2**20:,.0f} MiB for weights, gradients and "
            f"Adam of qat and qad{teacher}; activations come on top"
        )
    if "lora" in trains:
        base = packed * _PACKED_BITS / 8 + (original - packed) * computed
        lines.append(f"memory     {base / 2**20:,.0f} MiB for the packed base of lora")
    return "\n".join(lines)


def trainable(model: nn.Module) -> int:
    """Return how many parameters train."""
    return sum(param.numel() for param in model.parameters() if param.requires_grad)
