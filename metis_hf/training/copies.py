"""Finds the active and inactive copies of layers that PEFT makes for `modules_to_save`.

PEFT replaces a module with a wrapper, which holds the module and one copy per adapter. A call of
the model reaches exactly one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def by_place(
    model: nn.Module, layers: Mapping[str, Layer]
) -> tuple[dict[str, str], dict[str, list[Layer]]]:
    """Group layers by their name without PEFT's wrapper ("place").

    Returns:
        (place -> name of the active layer, place -> inactive layers).
    """
    wrapped = _wrapped(model)
    running: dict[str, str] = {}
    waiting: dict[str, list[Layer]] = {}
    for name, layer in layers.items():
        place, runs = name, True
        for inner, (wrapper, is_chosen) in wrapped.items():
            if name == inner or name.startswith(f"{inner}."):
                place, runs = wrapper + name[len(inner) :], is_chosen
        if runs:
            running[place] = name
        else:
            waiting.setdefault(place, []).append(layer)
    return running, waiting


def _wrapped(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Return the modules in PEFT's wrappers: name -> (name of the wrapper, is it active)."""
    found = {}
    for name, module in model.named_modules():
        saved, original = (module._modules.get(n) for n in ("modules_to_save", "original_module"))
        if not isinstance(saved, nn.ModuleDict) or original is None:
            continue
        wrapper: Any = module
        active = () if wrapper.disable_adapters else tuple(wrapper.active_adapters)
        chosen = active[0] if active and set(active) <= set(saved) else None
        found[f"{name}.original_module"] = name, chosen is None
        for adapter in saved:
            found[f"{name}.modules_to_save.{adapter}"] = name, adapter == chosen
    return found
