"""Finds the parts of a model that can be converted, and the reasons why other matrices cannot.

`linears` decides what a plain linear layer is. Each fused expert weight counts as a module named
after its parameter: "model.layers.0.mlp.experts.down_proj".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from metis_hf.config import MetisConfig
from metis_hf.conversion.heads import is_router, output_head
from metis_hf.conversion.linears import (
    is_linear,
    why_not_plain,
    why_not_split,
    why_not_trainable,
    why_only_read,
)
from metis_hf.layers.experts import fused_weights, is_fused_experts
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.make import as_linear, linear_shape
from metis_hf.schemes import build_scheme

# Names of 2-D parameters used in a matmul; others are tables, such as position embeddings.
_WEIGHT = re.compile(r"(^|_)(weight|kernel|proj|matrix|w)(_|$)", re.IGNORECASE)

# Maps a module's name in the model to the name that the config uses for it.
Naming = Callable[[str], str]
AS_THEY_ARE: Naming = str


@dataclass(frozen=True)
class Candidate:
    """A linear layer or a fused expert weight that could be converted.

    Attributes:
        fused: whether it is a fused expert weight.
        called: the names that the config may use for it, its first registered name first.
    """

    fused: bool
    called: tuple[str, ...]


def places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return all names of every module; a module registered in several places has several."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def find_candidates(
    model: nn.Module, config: MetisConfig, naming: Naming = AS_THEY_ARE
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return (candidates by name, reason by name why each other matrix cannot be converted)."""
    candidates: dict[str, Candidate] = {}
    others: dict[str, str] = {}
    for module, names in places(model).items():
        for key, reason in _parts(model, names[0], module):
            name = _join(names[0], key)
            called = tuple(naming(_join(place, key)) for place in names)
            reason = reason or _why_not_split(model, name, module, called, config)
            if reason is None:
                candidates[name] = Candidate(bool(key), called)
            else:
                others[name] = reason
    return candidates, others


def config_for(called: tuple[str, ...], config: MetisConfig) -> MetisConfig:
    """Return the config of a layer with these names; a pattern may match any of them."""
    configs = map(config.for_layer, called)
    return next((each for each in configs if each is not config), config)


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return (owning module, attribute) of a dotted module or parameter name."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _join(name: str, key: str) -> str:
    return f"{name}.{key}".strip(".")


def _parts(model: nn.Module, name: str, module: nn.Module) -> Iterator[tuple[str, str | None]]:
    """Yield (parameter name, or "" for the module itself; why it cannot be converted, or None)."""
    if is_linear(module):
        reason = why_not_plain(module) or why_only_read(*owner_of(model, name))
        yield "", reason or why_not_trainable(module.get_parameter("weight"))
    elif is_fused_experts(module):
        for key, weight in fused_weights(module).items():
            yield key, why_not_trainable(weight)
    else:
        for key, param in unknown_matrices(model, name, module):
            kind = f"{param.dim()}-D parameter of {type(module).__name__}"
            if param.dim() == 3 or is_of_experts(module):
                yield key, f"{kind}, unknown to transformers' experts interface"
            else:
                yield key, "router" if is_router(module) else f"{kind}, not a linear layer"


def unknown_matrices(
    model: nn.Module, name: str, module: nn.Module
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of a module's matrices whose layout is not declared anywhere.

    Examples: unknown expert classes, custom output heads, routers, the projections of
    nn.MultiheadAttention and nn.LSTM. The module is neither a linear layer nor fused experts.
    """
    owner = model.get_submodule(name.partition(".parametrizations.")[0])  # e.g. under a weight norm
    if isinstance(owner, nn.modules.conv._ConvNd):
        return
    for key, param in module.named_parameters(recurse=False):
        # Position embeddings are often [1 n d].
        if min(param.shape, default=0) > 1 and not key.endswith("bias"):
            # 3-D: one matrix per expert. DBRX stacks the experts along the rows of a 2-D matrix.
            is_matrix = is_of_experts(module) or _is_weight(model, module, key)
            if param.dim() == 3 or (param.dim() == 2 and is_matrix):
                yield key, param


def is_of_experts(module: nn.Module) -> bool:
    """Return whether the class name says that the module holds experts."""
    return "Expert" in type(module).__name__


def _is_weight(model: nn.Module, module: nn.Module, key: str) -> bool:
    """Return whether a 2-D parameter is used in a matmul: by its name, or as an output head."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | MetisLayer) or "Embed" in (
        type(module).__name__
    ):
        return False
    return bool(_WEIGHT.search(key)) or output_head(model) is module


def _why_not_split(
    model: nn.Module, name: str, module: nn.Module, called: tuple[str, ...], config: MetisConfig
) -> str | None:
    """Return why factors cannot replace the weight, where the config stores factors; else None."""
    if not is_linear(module) or (reason := why_not_split(*owner_of(model, name))) is None:
        return None
    scheme = build_scheme(config_for(called, config), *linear_shape(as_linear(module)))
    return reason if scheme.weight.is_split else None
