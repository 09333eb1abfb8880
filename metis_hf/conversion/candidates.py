"""Parts of a model that could be converted, those that only look so, and the names of both.

A linear layer is a matter of `linears`. Fused experts count as modules named after their
parameters: "model.layers.0.mlp.experts.down_proj".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from metis_hf.config import MetisConfig
from metis_hf.conversion.heads import is_router
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

# Names of 2-D parameters that multiply rows; others are tables, such as position embeddings.
_WEIGHT = re.compile(r"(^|_)(weight|kernel|proj|matrix|w)(_|$)", re.IGNORECASE)

# From the names of a model's modules to the names by which a config means them.
Naming = Callable[[str], str]
AS_THEY_ARE: Naming = str


@dataclass(frozen=True)
class Candidate:
    """A linear layer or a fused expert weight that could be converted.

    Attributes:
        fused: whether it is a fused expert weight.
        called: the names by which a config means it, the name of its first place first.
    """

    fused: bool
    called: tuple[str, ...]


def places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the names of every module; several where it is registered in several places."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def find_candidates(
    model: nn.Module, config: MetisConfig, naming: Naming = AS_THEY_ARE
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return (candidates by name, reasons by name why the others are none)."""
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
    """Return the config of a layer that has these names, with the patterns for any applied."""
    configs = map(config.for_layer, called)
    return next((each for each in configs if each is not config), config)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}".strip(".")


def _parts(model: nn.Module, name: str, module: nn.Module) -> Iterator[tuple[str, str | None]]:
    """Return (parameter of a module, or "" for the module; why it cannot be converted)."""
    if is_linear(module):
        path, _, child = name.rpartition(".")
        reason = why_not_plain(module) or why_only_read(model.get_submodule(path), child)
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
                yield key, "router" if is_router(module) else f"{kind}, which is no linear layer"


def unknown_matrices(
    model: nn.Module, name: str, module: nn.Module
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of matrices in a form that nobody declares.

    Experts have them, and modules that are no linear layers: an output head of one's
    own, routers, the projections of nn.MultiheadAttention and nn.LSTM.

    Args:
        model: the whole.
        name: of a module in it that is no linear layer and none of fused experts.
        module: of that name.
    """
    owner = model.get_submodule(name.partition(".parametrizations.")[0])  # under a weight norm, say
    if isinstance(owner, nn.modules.conv._ConvNd):
        return
    for key, param in module.named_parameters(recurse=False):
        # Position embeddings are often [1 n d].
        if min(param.shape, default=0) > 1 and not key.endswith("bias"):
            # One matrix for each expert; DBRX has all of them below one another.
            is_matrix = is_of_experts(module) or _is_weight(model, module, key)
            if param.dim() == 3 or (param.dim() == 2 and is_matrix):
                yield key, param


def is_of_experts(module: nn.Module) -> bool:
    """Return whether a module says by its class that it holds experts."""
    return "Expert" in type(module).__name__


def _is_weight(model: nn.Module, module: nn.Module, key: str) -> bool:
    """Return whether a 2-D parameter multiplies rows: by its name, or as an output head's."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | MetisLayer) or "Embed" in (
        type(module).__name__
    ):
        return False
    get_head = getattr(model, "get_output_embeddings", None)
    return bool(_WEIGHT.search(key)) or (get_head is not None and get_head() is module)


def _why_not_split(
    model: nn.Module, name: str, module: nn.Module, called: tuple[str, ...], config: MetisConfig
) -> str | None:
    """Return why the factors that a config stores cannot take the place of a weight; None: can."""
    path, _, child = name.rpartition(".")
    if not is_linear(module) or (reason := why_not_split(model.get_submodule(path), child)) is None:
        return None
    scheme = build_scheme(config_for(called, config), *linear_shape(as_linear(module)))
    return reason if scheme.weight.is_split else None
