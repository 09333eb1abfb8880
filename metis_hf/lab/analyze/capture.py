"""Captures inputs and output gradients of linear layers while a batch of text runs.

Every layer is measured inside its hook, on the first micro-batch, and its tensors are freed at
once. Only the few layers that get a portrait keep their rows for the whole batch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from metis_hf.lab.analyze.stored_weights import WeightSource
from metis_hf.lab.texts import model_sequences
from metis_hf.shared.messages import reading
from metis_hf.shared.quiet import quiet

MICRO_BATCH = 8  # sequences
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

Measure = Callable[[str, str, Tensor], None]  # layer, "activation" or "gradient", rows [t c]


def token_ids(source: WeightSource, text: Path, sequences: int, length: int) -> Tensor:
    """Tokenize the beginning of a text into sequences [n length] of ids, n <= sequences."""
    for name in _TOKENIZER_FILES:
        with contextlib.suppress(FileNotFoundError):
            source.file(name)
            break
    else:
        raise FileNotFoundError(
            f"{source.checkpoint} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}), "
            "but a text needs one. Save the tokenizer there with tokenizer.save_pretrained, or "
            "omit the text to analyze only the weights"
        )
    with reading(source.checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(source.checkpoint, trust_remote_code=False)
    return model_sequences(
        tokenizer, text, sequences, length, config=source.config, model=source.checkpoint
    )


def load_model(source: WeightSource) -> PreTrainedModel:
    """Load the model in eval mode (no dropout, rounding to nearest), with frozen parameters."""
    name = (getattr(source.config, "architectures", None) or ["none"])[0]
    cls: Any = getattr(transformers, name, None)
    if cls is None:
        raise ValueError(
            f"the config of {source.checkpoint} names the class {name!r}, which transformers "
            "does not have; omit the text to analyze only the weights"
        )
    with quiet(), reading(source.checkpoint):
        return (
            cls.from_pretrained(source.checkpoint, trust_remote_code=False)
            .eval()
            .requires_grad_(False)
        )


def has_loss(model: PreTrainedModel) -> bool:
    """Return whether the model predicts tokens and computes a loss, which gives gradients."""
    return "labels" in inspect.signature(model.forward).parameters and model.can_generate()


@dataclass
class Capture:
    """Hooks on a model's layers while batches run."""

    keep: set[str]  # layers whose rows are kept
    measure: Measure  # called once per layer and kind with the rows of the first micro-batch
    done: Callable[[int], None] = lambda number: None  # called with a finished micro-batch's number
    kept: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)  # by layer and kind
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def run(self, model: PreTrainedModel, ids: Tensor, layers: Iterable[str]) -> None:
        """Run forward (and backward, if the model has a loss) over ids [n length]."""
        modules = dict(model.named_modules())
        handles = [
            modules[name].register_forward_hook(self._hook(name))
            for name in layers
            if name in modules
        ]
        backward = has_loss(model)
        # With labels a decoder derives its input from them. Without, it reads the same text.
        names = ("input_ids", "decoder_input_ids")
        inputs = [n for n in names if n in inspect.signature(model.forward).parameters]
        if backward:  # parameters are frozen; the graph starts at the embeddings
            model.enable_input_require_grads()
        try:
            for number, batch in enumerate(ids.to(model.device).split(MICRO_BATCH)):
                if not backward:
                    with torch.no_grad():
                        model(**dict.fromkeys(inputs, batch))
                else:
                    # The loss is a mean over the batch: unscaled, tokens of a smaller last batch
                    # would weigh more.
                    share = len(batch) / MICRO_BATCH
                    (model(input_ids=batch, labels=batch).loss * share).backward()
                self.done(number)
        finally:
            for handle in handles:
                handle.remove()

    def rows(self, layer: str, kind: str) -> Tensor | None:
        """Return and drop all kept rows [t c] of a layer, fp32."""
        parts = self.kept.pop((layer, kind), None)
        return None if parts is None else torch.cat(parts).float()

    def _hook(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self._take(name, "activation", args[0])
            if output.requires_grad:
                output.register_hook(lambda grad: self._take(name, "gradient", grad))

        return hook

    @torch.no_grad()
    def _take(self, name: str, kind: str, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).cpu()
        if (name, kind) not in self._seen:
            self._seen.add((name, kind))
            self.measure(name, kind, x.float())
        if name in self.keep:
            self.kept.setdefault((name, kind), []).append(x.clone())
