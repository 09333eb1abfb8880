"""Effects of schemes on predictions: loss, divergence from the exact model, agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from metis_hf.lab.fidelity.subject import Part, running
from metis_hf.schemes import Scheme

Batch = dict[str, float]  # statistics of a batch by name
_ROWS = 1024  # rows of logits that are converted to fp32 log-probabilities at a time


@torch.no_grad()
def predictions(
    model: PreTrainedModel,
    layers: Mapping[str, Part],
    ids: Tensor,
    batch: int,
    schemes: Sequence[dict[str, Scheme]],
    advance: Callable[[], None] = lambda: None,
    *,
    training: bool = False,
) -> list[list[Batch]]:
    """Compare the next-token distributions of schemes with the exact model's, batch by batch.

    Args:
        model: a model with converted layers.
        layers: the converted layers, and quantized attention.
        ids: [n length]
        batch: sequences per batch.
        schemes: what is compared: schemes by layer; layers that are not named run exactly.
        advance: called after each scheme of each batch.
        training: round as in training; else as in evaluation. Dropout is off.

    Returns:
        For each of `schemes` and each batch: "loss" and "exact", nats per token; "kl", of the exact
        distribution from the scheme's, nats per token; "top1", the share of tokens with the same
        likeliest successor.
    """
    model.eval()
    for part in layers.values():
        part.train(training)
    found: list[list[Batch]] = [[] for _ in schemes]
    for rows in ids.split(batch):
        rows = rows.to(model.device)
        labels = rows[:, 1:].flatten()
        with running(layers):
            exact = model(input_ids=rows).logits[:, :-1].flatten(0, 1)
        for scheme, batches in zip(schemes, found):
            with running(layers, scheme):
                logits = model(input_ids=rows).logits[:, :-1].flatten(0, 1)
            batches.append(_compare(exact, logits, labels))
            advance()
    return found


def _compare(exact: Tensor, logits: Tensor, labels: Tensor) -> Batch:
    """Return the statistics of logits [t v] against exact ones, with labels [t]."""
    sums = torch.zeros(4, dtype=torch.float64)
    parts = zip(exact.split(_ROWS), logits.split(_ROWS), labels.split(_ROWS))
    for p, q, label in parts:
        p, q = F.log_softmax(p.float(), -1), F.log_softmax(q.float(), -1)
        found = (
            F.nll_loss(q, label, reduction="sum"),
            F.nll_loss(p, label, reduction="sum"),
            F.kl_div(q, p, reduction="sum", log_target=True),
            (p.argmax(-1) == q.argmax(-1)).sum(),
        )
        sums += torch.stack(found).cpu().double()  # some devices have no fp64
    loss, exact_loss, kl, top1 = (sums / len(labels)).tolist()
    return {"loss": loss, "exact": exact_loss, "kl": kl, "top1": top1}


def effect(batches: Sequence[Batch]) -> dict[str, float]:
    """Return means over batches: "loss", the rise above the exact model's in %, and "kl"."""
    loss, exact, kl = (
        math.fsum(batch[key] for batch in batches) / len(batches) for key in ("loss", "exact", "kl")
    )
    return {"loss": 100 * (loss - exact) / exact, "kl": kl}
