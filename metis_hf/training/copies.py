"""Layers of which PEFT keeps copies for `modules_to_save`: the one that runs, and those that wait.

PEFT puts a wrapper in a module's place, with the module itself and a copy for each adapter in it.
Calls of the model reach one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


class Copy(NamedTuple):
    """A module inside such a wrapper.

    Attributes:
        place: name of the wrapper.
        runs: whether calls of the model reach this module.
    """

    place: str
    runs: bool


def copies(model: nn.Module) -> dict[str, Copy]:
    """Return the modules that PEFT's wrappers hold, by name."""
    found = {}
    for name, module in model.named_modules():
        saved, original = (module._modules.get(n) for n in ("modules_to_save", "original_module"))
        if not isinstance(saved, nn.ModuleDict) or original is None:
            continue
        wrapper: Any = module
        active = () if wrapper.disable_adapters else tuple(wrapper.active_adapters)
        chosen = active[0] if active and set(active) <= set(saved) else None
        found[f"{name}.original_module"] = Copy(name, chosen is None)
        for adapter in saved:
            found[f"{name}.modules_to_save.{adapter}"] = Copy(name, adapter == chosen)
    return found


def by_place(
    model: nn.Module, layers: Mapping[str, Layer]
) -> tuple[dict[str, str], dict[str, list[Layer]]]:
    """Sort layers of a model by the place that they stand in.

    Returns:
        (the layer's name for each place that calls of the model reach, the layers that wait there).
    """
    wrapped = copies(model)
    running: dict[str, str] = {}
    waiting: dict[str, list[Layer]] = {}
    for name, layer in layers.items():
        place, runs = name, True
        for inner, copy in wrapped.items():
            if name == inner or name.startswith(f"{inner}."):
                place, runs = copy.place + name[len(inner) :], copy.runs
        if runs:
            running[place] = name
        else:
            waiting.setdefault(place, []).append(layer)
    return running, waiting
