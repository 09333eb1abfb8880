"""The model that is measured, its text as batches of tokens, and temporary conversion."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model, metis_layers, to_dense
from metis_hf.lab.model_source import open_model
from metis_hf.lab.texts import model_sequences
from metis_hf.layers.attention import AttentionProducts
from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes import Scheme, build_scheme
from metis_hf.shared.quiet import quiet


@dataclass
class Subject:
    """A causal language model with dense weights, and tokens of a text."""

    model: PreTrainedModel
    held_out: Tensor  # [n length], for the loss
    training: Tensor  # [m length], for gradients
    identity: Any  # identifies model and text, JSON-ready


@dataclass(frozen=True)
class ModelAndText:
    """A model, and the beginning of a text that it is measured on.

    Attributes:
        model: a checkpoint, run or hub name; a converted or packed model is measured with the dense
            weights that it represents.
        text: a UTF-8 file, or JSON lines, see `data.chat`.
        sequences: largest number of sequences.
        length: tokens per sequence.
        batch: sequences per batch.
        dtype: dtype of the weights and of the exact computation.
        device: such as "cpu" or "cuda".
        tokenizer: directory of a tokenizer to use instead of the model's own.
    """

    model: str
    text: Path
    sequences: int = 48
    length: int = 256
    batch: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    tokenizer: str | None = None

    def open(self) -> Subject:
        """Open both: the first two thirds of the text give the loss, the last third gradients.

        Raises:
            FileNotFoundError: no such model or file.
            ValueError: no tokenizer; no causal language model; a text that is too short; tokens
                that the model does not have.
        """
        if self.sequences < 3 or self.batch < 1:
            raise ValueError(
                f"{self.sequences} sequences in batches of {self.batch}; choose at least 3 "
                "sequences, in batches of at least 1"
            )
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype {self.dtype!r} is not known; choose float32 or bfloat16")
        checkpoint = open_model(self.model)
        ids = model_sequences(
            checkpoint.tokenizer(self.tokenizer),
            self.text,
            self.sequences,
            self.length,
            config=checkpoint.config(),
            model=self.model,
            fewest=2,  # one for the loss, one for a gradient
        )
        with quiet():
            model = checkpoint.load("dense", self.dtype, torch.device(self.device))
        for one in (model.config, getattr(model, "generation_config", None)):
            if one is not None:
                one.use_cache = False
        held_out, training = _in_batches(ids, self.batch)
        of_text = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
        identity = [checkpoint.fingerprint(), of_text, list(ids.shape), self.dtype]
        return Subject(model, held_out, training, identity)


def _in_batches(ids: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Return (sequences for the loss, sequences for gradients), the latter about a third."""
    count = len(ids)
    training = max(1, count // 3)
    if count >= 2 * batch:  # whole batches: a smaller one would have the same weight
        training = max(batch, training - training % batch)
        held_out = (count - training) // batch * batch
    else:
        held_out = min(count - training, batch)
        training = count - held_out
    return ids[:held_out], ids[-training:]


@contextlib.contextmanager
def converted(model: PreTrainedModel, config: MetisConfig) -> Iterator[dict[str, MetisLayer]]:
    """Convert a model in place for the block, and restore its exact weights afterwards.

    Yields:
        The converted layers by name.

    Raises:
        ValueError: the model is converted already; or as `get_metis_model`. It is then unchanged.
    """
    if any(metis_layers(model)):
        raise ValueError(
            "the model is already converted, but schemes are measured on a model with dense "
            "weights; call to_dense(model) first, or load the checkpoint from which it was "
            "converted"
        )
    # FP4 units cannot multiply with only one operand in four bits.
    config = config.replace(backend="emulated")
    needs_grad = {name: p.requires_grad for name, p in model.named_parameters()}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    # Fused experts are rebuilt from their layers, which rounds if the layers store factors.
    plain = config.replace(scheme_pattern={})
    splits = any(
        build_scheme(plain.replace(scheme=scheme), 256, 256).weight.is_split
        for scheme in {config.scheme, *config.scheme_pattern.values()}
    )
    fused = {n: p.detach().clone() for n, p in model.named_parameters() if splits and p.dim() == 3}
    try:
        get_metis_model(model, config)
        yield dict(metis_layers(model))
    finally:
        names = {name for name, _ in metis_layers(model)}
        if names:
            to_dense(model)
        for name in names & linears.keys():
            model.set_submodule(name, linears[name])
        for name, parameter in model.named_parameters():
            if name in fused:
                parameter.data.copy_(fused[name])
            parameter.requires_grad_(needs_grad[name])
            parameter.grad = None


Part = MetisLayer | AttentionProducts  # modules with a scheme


@contextlib.contextmanager
def running(layers: Mapping[str, Part], schemes: Mapping[str, Scheme] | None = None):
    """Switch layers and attention to other schemes for the block; parts without one run exactly.

    The layers' states and parameters are unchanged.
    """
    before = {name: (layer.scheme, layer.eval_scheme) for name, layer in layers.items()}
    exact = Scheme()
    try:
        for name, layer in layers.items():
            scheme = (schemes or {}).get(name)
            layer.scheme = exact if scheme is None else scheme
            layer.eval_scheme = layer.scheme.deterministic()
            _forget(layer)
        yield
    finally:
        for name, layer in layers.items():
            layer.scheme, layer.eval_scheme = before[name]
            _forget(layer)


def _forget(part: Part) -> None:
    if isinstance(part, MetisLayer):
        part.evaluation_weight.forget()


def trainable(layers: dict[str, MetisLayer]) -> dict[str, nn.Parameter]:
    """Return each layer's matrix whose gradient stands for the weight's: [o i] or [i o]."""
    return {
        name: getattr(layer, layer.weight_form.names[-1])  # the residual of a split weight
        for name, layer in layers.items()
    }
