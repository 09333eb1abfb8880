"""Bytes that a forward pass keeps for the backward pass, measured without running it.

The model runs on fake tensors (torch._subclasses.fake_tensor): shapes, dtypes and storages are
those of a real run on the CPU, values do not exist. Under CUDA autocast a few elementwise functions
(pow, layer_norm) compute in fp32 where the CPU's stay in bf16.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, masking_utils

from metis_hf.conversion.convert import metis_layers
from metis_hf.numerics import definition


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of distinct storages that autograd saves; parameters are not among them.

    Attributes:
        linears: saved inside converted layers.
        others: saved elsewhere.
        weight_copies: casts of parameters, which autocast keeps until the backward pass is over.
    """

    linears: int = 0
    others: int = 0
    weight_copies: int = 0

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(
            self.linears + other.linears,
            self.others + other.others,
            self.weight_copies + other.weight_copies,
        )

    def __mul__(self, factor: float) -> SavedBytes:
        return SavedBytes(
            round(self.linears * factor),
            round(self.others * factor),
            round(self.weight_copies * factor),
        )

    def __sub__(self, other: SavedBytes) -> SavedBytes:
        return self + other * -1


def trace_saved_bytes(
    model: PreTrainedModel,
    shape: tuple[int, int],
    *,
    autocast: torch.dtype | None,
    weights: torch.dtype = torch.float32,
    checkpointing: bool = False,
) -> SavedBytes:
    """Trace one training forward pass, loss included, and return what it saves.

    Args:
        model: on the meta device; left as it is.
        shape: (sequences, tokens per sequence).
        autocast: dtype of the GEMMs; None: that of the weights.
        weights: dtype of the parameters during the pass.
        checkpointing: with transformers' activation checkpointing.
    """
    model = copy.deepcopy(model).to(weights)  # type: ignore[arg-type]
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, _no_packed_sequences(), _no_search():
            model.to_empty(device="cpu").train()
            ids = torch.zeros(shape, dtype=torch.long)
            return measure_saved_bytes(model, ids, autocast=autocast, checkpointing=checkpointing)
    finally:
        _clear_caches()  # of tensors without values


def measure_saved_bytes(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    autocast: torch.dtype | None = None,
    checkpointing: bool = False,
) -> SavedBytes:
    """Return the same for one real forward pass of a model on `ids` [sequences, tokens]."""
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    saved: dict[int, tuple[Tensor, bool]] = {}  # by storage; the tensor keeps its address taken
    inside = [False]

    def pack(x: Tensor) -> Tensor:
        saved.setdefault(_storage(x), (x, inside[0]))
        return x

    def enter(*_: Any) -> None:
        inside[0] = True

    def leave(*_: Any) -> None:
        inside[0] = False

    hooks = []
    for _, layer in metis_layers(model):
        hooks.append(layer.register_forward_pre_hook(enter))
        hooks.append(layer.register_forward_hook(leave))
    casts = _CastsOf({_storage(p) for p in model.parameters()})
    cast = (
        contextlib.nullcontext() if autocast is None else torch.autocast(ids.device.type, autocast)
    )
    with cast, casts, saved_tensors_hooks(pack, lambda x: x):
        output = model(input_ids=ids, labels=ids)
    for hook in hooks:
        hook.remove()
    del output
    total = SavedBytes()
    for storage, (x, in_linear) in saved.items():
        size = x.untyped_storage().nbytes()
        if storage in casts.results:
            total += SavedBytes(weight_copies=size)
        elif storage not in casts.sources:
            total += SavedBytes(linears=size) if in_linear else SavedBytes(others=size)
    return total


def _no_packed_sequences() -> contextlib.AbstractContextManager:
    """Keep transformers from looking for packed sequences by value: fake tensors have none."""
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)


def _no_search() -> contextlib.AbstractContextManager:
    """Keep quantizers from trying scales, most of a trace: whichever it is, it takes as much."""

    def first(x: Tensor, amax: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return amax.clone(), amax.clone()

    return mock.patch.object(definition, "least_error_scale", first)


def _clear_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("metis_hf."):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _CastsOf(TorchDispatchMode):
    """Notes the storages that casts of some tensors give."""

    def __init__(self, sources: set[int]) -> None:
        super().__init__()
        self.sources = sources
        self.results: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _storage(args[0]) in self.sources:
            self.results[_storage(out)] = out
        return out
