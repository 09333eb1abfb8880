"""Measurements of a fine-tuned model on held-out text: loss, divergence, the loss as exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from metis_hf.deploy.packed import load_deployed
from metis_hf.training.distillation_loss import distillation_loss

Texts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Measured:
    """Measurements of a model on one text; nats per token.

    Attributes:
        loss: cross entropy, in the scheme, computed in fp32 between the quantizers.
        kl: divergence of the unquantized model's next-token distributions from these.
        exported: the loss of the export, read and computed in BF16 as `load_deployed` says; None
            where it was not read.
    """

    loss: float
    kl: float = 0.0
    exported: float | None = None


class HeldOut:
    """Texts to measure on, and how."""

    def __init__(self, texts: Texts, batch: int, device: torch.device) -> None:
        """Take the texts.

        Args:
            texts: token ids [sequences length] by name.
            batch: sequences of a forward pass.
            device: where models run.
        """
        self.texts, self.batch, self.device = texts, batch, device

    @property
    def tokens(self) -> dict[str, int]:
        """Return how many tokens of each text are predicted."""
        return {name: rows[:, 1:].numel() for name, rows in self.texts.items()}

    def measure(
        self,
        model: PreTrainedModel,
        exact: PreTrainedModel | None = None,
        export: Path | None = None,
    ) -> dict[str, Measured]:
        """Return what a model is worth on each text.

        Args:
            model: computes in the precision of its weights.
            exact: the unquantized model; None: the divergence is 0.
            export: a directory in compressed-tensors' layout, which is measured as well.
        """
        reader = None
        if export is not None and find_spec("compressed_tensors"):
            reader = load_deployed(export)
            nn.Module.to(reader, self.device)
        found = {}
        for name, rows in self.texts.items():
            loss, divergence = self._of(model, rows, exact)
            exported = None if reader is None else self._of(reader, rows, None)[0]
            found[name] = Measured(loss, divergence, exported)
        return found

    @torch.no_grad()
    def _of(
        self, model: PreTrainedModel, rows: Tensor, exact: PreTrainedModel | None
    ) -> tuple[float, float]:
        totals = torch.zeros(2, dtype=torch.float64)
        training, device = model.training, next(model.parameters()).device
        model.eval()
        for part in rows.split(self.batch):
            ids = part.to(device)
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
