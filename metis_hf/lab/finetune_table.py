"""Measurements of fine-tuning for deployment, with one or more seeds, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.lab.compare.statistics import t_interval
from metis_hf.lab.show.table import markdown_table
from metis_hf.training.distillation_loss import distillation_loss

HEADER = ("Method", "Trained", "Steps", "Loss", "Rise %", "Recovered %", "KL", "Exported")


@dataclass(frozen=True)
class Measured:
    """Measurements of a model on one text, in nats per token."""

    loss: float  # cross entropy in the scheme; fp32 between the quantizers
    kl: float = 0.0  # divergence of the exact model's next-token distributions from the model's
    exported: float | None = None  # loss of the export in BF16, as `load_deployed` reads it


@dataclass(frozen=True)
class Outcome:
    """The result of one method."""

    method: str  # "exact" (unquantized), a method such as "ptq", or a scheme for comparison
    texts: dict[str, Measured]  # by the name of the text
    trained: int = 0  # number of trained parameters
    steps: int = 0  # optimizer steps
    directory: str | None = None  # the export's directory
    code: str | None = None  # commit and digest of the numerics

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Outcome:
        """Make an outcome from the dict that `dataclasses.asdict` gives."""
        texts = {name: Measured(**each) for name, each in values["texts"].items()}
        return cls(**{**values, "texts": texts})


@torch.no_grad()
def losses(model: Any, rows: Tensor, batch: int, exact: Any = None) -> tuple[float, float]:
    """Return (cross entropy, KL divergence from the exact model), nats per token.

    Args:
        model: a causal language model; it is measured in evaluation mode.
        rows: token ids [sequences length].
        batch: sequences per forward pass.
        exact: the unquantized model; None gives a divergence of 0.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    training, device = model.training, next(model.parameters()).device
    model.eval()
    for ids in rows.to(device).split(batch):
        logits = model(input_ids=ids, use_cache=False).logits
        for row, targets in zip(logits[:, :-1], ids[:, 1:]):
            totals[0] += F.cross_entropy(row.float(), targets, reduction="sum").cpu()
        if exact is not None:
            target = exact.eval()(input_ids=ids, use_cache=False).logits
            mask = torch.ones_like(ids, dtype=torch.bool)
            mask[:, -1] = False
            totals[1] += distillation_loss(logits, target, mask, tokens=1).cpu()
    model.train(training)
    loss, divergence = (totals / rows[:, 1:].numel()).tolist()
    return loss, divergence


Run = Sequence[Outcome]


def rows_of(runs: Sequence[Run], text: str) -> list[tuple[str, ...]]:
    """Return the rows of a table; "Recovered" is the share of ptq's loss rise that a method undoes.

    Several runs, one per seed, give means, with a 95 % interval if they differ. The first run
    decides which methods are shown.
    """
    rows: list[tuple[str, ...]] = []
    losses = [{one.method: one.texts[text].loss for one in run} for run in runs]
    for one in runs[0]:
        found = [each.texts[text] for run in runs for each in run if each.method == one.method]
        own = [of for of in losses if one.method in of]
        rises = [100 * (of[one.method] / of["exact"] - 1) for of in own]
        undone = [
            100 * (of["ptq"] - of[one.method]) / (of["ptq"] - of["exact"])
            for of in own
            if one.steps and of["ptq"] != of["exact"]
        ]
        plain = one.method == "exact"
        trained = f"{one.trained / 1e6:.1f}M" if one.trained >= 10**6 else f"{one.trained:,}"
        rows.append(
            (
                one.method,
                trained if one.trained else "",
                str(one.steps) if one.steps else "",
                _mean([each.loss for each in found], ".4f"),
                "" if plain else _mean(rises, "+.2f"),
                _mean(undone, ".0f"),
                "" if plain else _mean([each.kl for each in found], ".4f"),
                _mean([each.exported for each in found if each.exported is not None], ".4f"),
            )
        )
    return rows


def _mean(values: Sequence[float], form: str) -> str:
    """Format a mean with its interval; without interval if all values are equal, "" if none."""
    if not values:
        return ""
    if len(set(values)) == 1:
        return format(values[0], form)
    interval = t_interval(values)
    return f"{interval.mean:{form}} ± {interval.half_width:{form.removeprefix('+')}}"


def markdown_tables(*runs: Run) -> str:
    """Return one table per text, below the text's name if there are several."""
    texts = runs[0][0].texts
    titled = len(texts) > 1
    return "\n".join(
        f"**{text}**\n\n" * titled + markdown_table(HEADER, rows_of(runs, text)) for text in texts
    )


def different_code(run: Run) -> str:
    """Return a paragraph that lists each method's code; empty if the code was the same for all."""
    found: dict[str, list[str]] = {}
    for outcome in run:
        if outcome.code is not None:
            found.setdefault(outcome.code, []).append(outcome.method)
    said = "; ".join(f"{code}: {', '.join(methods)}" for code, methods in found.items())
    start = (
        "These methods ran with different code or torch versions, which also affects their losses."
    )
    return f"\n{start} {said}.\n" if len(found) > 1 else ""
