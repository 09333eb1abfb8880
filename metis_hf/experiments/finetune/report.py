"""The plan of a fine-tuning in words, and the table of what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import AutoConfig

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model
from metis_hf.conversion.report import ConversionReport
from metis_hf.experiments.finetune.arguments import FinetuneArguments
from metis_hf.planning.plan import meta_model

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
        method: its name; "exact" for the model as it was.
        loss: held-out cross entropy, nats per token, in the scheme.
        kl: divergence of the unquantized model's distributions from these, nats per token.
        exported: the same of the export, read and computed by the compressed-tensors library in
            BF16; None where it was not read.
        trained: parameters that trained.
        steps: of the optimizer.
        directory: of the export; None for the model as it was.
    """

    method: str
    loss: float
    kl: float = 0.0
    exported: float | None = None
    trained: int = 0
    steps: int = 0
    directory: str | None = None


def rows_of(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return the rows of the table: rise over the exact model, and how much of ptq's is undone."""
    exact = next(outcome.loss for outcome in outcomes if outcome.method == "exact")
    ptq = next((outcome.loss for outcome in outcomes if outcome.method == "ptq"), None)
    rows: list[tuple[str, ...]] = []
    for one in outcomes:
        recovered = ""
        if ptq is not None and one.method not in ("exact", "ptq") and ptq != exact:
            recovered = f"{100 * (ptq - one.loss) / (ptq - exact):.0f}"
        rows.append(
            (
                one.method,
                _count(one.trained) if one.trained else "",
                str(one.steps) if one.steps else "",
                f"{one.loss:.4f}",
                f"{100 * (one.loss / exact - 1):+.2f}" if one.method != "exact" else "",
                recovered,
                f"{one.kl:.4f}" if one.method != "exact" else "",
                "" if one.exported is None else f"{one.exported:.4f}",
            )
        )
    return rows


def _count(parameters: int) -> str:
    """Return a number of parameters in a few characters."""
    return f"{parameters / 1e6:.1f}M" if parameters >= 10**6 else f"{parameters:,}"


def describe(a: FinetuneArguments, train: int, held_out: int, steps: int) -> str:
    """Return what a fine-tuning takes, in lines of text; of the model its config is read alone.

    Args:
        a: the arguments.
        train: sequences to train on.
        held_out: sequences to measure the loss on.
        steps: of the optimizer.
    """
    methods = a.methods()
    model = meta_model(AutoConfig.from_pretrained(a.model))
    original = sum(param.numel() for param in model.parameters())
    report = get_metis_model(model, MetisConfig(scheme=a.scheme)).metis_report
    assert isinstance(report, ConversionReport)
    packed = report.converted_params
    whole = original * _BF16_BITS / 8
    export = whole - packed * (_BF16_BITS - _PACKED_BITS) / 8
    tokens = steps * a.global_batch * a.sequence_length
    lines = [
        f"model      {original:,} parameters, {packed:,} of them packed",
        f"export     {export / 2**20:,.0f} MiB; in BF16 {whole / 2**20:,.0f} MiB",
        f"data       {train:,} sequences of {a.sequence_length} tokens to train on, "
        f"{held_out:,} held out",
    ]
    trains = [method for method in methods if method != "ptq"]
    if trains:
        seen = tokens / (train * a.sequence_length)
        lines.append(
            f"training   {steps:,} steps, {tokens:,} tokens, each sequence {seen:.1f} times"
        )
    if {"qat", "qad"} & set(trains):
        teacher = f", and {4 * original / 2**20:,.0f} MiB for qad's teacher" * ("qad" in trains)
        lines.append(
            f"memory     {_TRAINED_BYTES * original / 2**20:,.0f} MiB for weights, gradients and "
            f"Adam of qat and qad{teacher}; activations come on top"
        )
    if "lora" in trains:
        lines.append(f"memory     {export / 2**20:,.0f} MiB for the packed base of lora")
    return "\n".join(lines)


def trainable(model: nn.Module) -> int:
    """Return how many parameters train."""
    return sum(param.numel() for param in model.parameters() if param.requires_grad)
