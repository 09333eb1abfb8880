"""Replaces a module under all its names, keeping its hooks.

Also disables torch's fast path in encoder layers that contain converted layers: the fast path reads
weights and does not call the layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate.hooks import add_hook_to_module
from torch import nn

from metis_hf.layers.linear import MetisLayer

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def replace_module(model: nn.Module, names: Iterable[str], new: nn.Module) -> None:
    """Replace the module that has all these names, and move its hooks to the new module.

    The new module has no hooks of its own. Hook handles stay valid: it takes over the same
    dictionaries.
    """
    names = list(names)
    old = model.get_submodule(names[0])
    for name in _HOOKS:
        new.__dict__[name] = old.__dict__[name]
    hook: Any = old.__dict__.get("_hf_hook")
    if hook is not None:
        add_hook_to_module(new, hook)
    for name in names:
        model.set_submodule(name, new)


def offloaded(module: nn.Module) -> bool:
    """Return whether accelerate keeps a module's weights elsewhere between calls."""
    hook: Any = module.__dict__.get("_hf_hook")
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))


def leave_fast_path(model: nn.Module) -> None:
    """Disable the fast path of torch's encoder layers that contain converted layers."""
    for module in _encoders(model):
        if isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(_leave_fast_path)
        elif module.use_nested_tensor:
            module.use_nested_tensor = False
            module._metis_nested = True  # type: ignore[assignment]


def restore_fast_path(model: nn.Module) -> None:
    """Undo `leave_fast_path`."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is _leave_fast_path]:
                del hooks[key]
        elif module.__dict__.pop("_metis_nested", False):
            module.use_nested_tensor = True  # type: ignore[assignment]


def _encoders(model: nn.Module) -> list[Any]:
    kinds = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        and any(isinstance(part, MetisLayer) for part in module.modules())
    ]


def _leave_fast_path(module: nn.Module, args: Any) -> None:
    """Do nothing: torch skips the fast path for a layer with hooks."""
