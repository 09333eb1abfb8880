"""Which modules of a model a config selects: PEFT's own matching, and the reasons for leaving out.

The PEFT helpers are semi-private; this file is the only one that calls them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace

from torch import nn
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Selection:
    """Names of modules to convert, and of linear layers that stay, with the reason."""

    names: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def select_modules(model: nn.Module, config: MetisConfig) -> Selection:
    """Applies target_modules, exclude_modules and the block policy to a model.

    Raises:
        ValueError: nothing matched; a target is not a linear layer; a target's weight is tied.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    linears = {n: m for n, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)}
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer; there is nothing to convert"
        )
    everything = config.target_modules == ALL_LINEAR
    matcher = SimpleNamespace(
        target_modules=".*" if everything else config.target_modules,
        exclude_modules=config.exclude_modules,
        modules_to_save=None,
        target_parameters=None,
        layers_to_transform=None,
        layers_pattern=None,
    )
    if isinstance(matcher.target_modules, tuple):
        matcher.target_modules = list(matcher.target_modules)
    head = _head_name(model)
    tied = _tied_weights(model)
    skipped: dict[str, str] = {}
    names: list[str] = []
    for name, module in model.named_modules():
        linear = name in linears
        if not linear and (everything or not name):
            if linear_like(module):
                skipped[name] = f"its class {type(module).__name__} is not exactly nn.Linear"
            continue
        found = check_target_module_exists(matcher, name)
        if not found:
            if linear:
                excluded = type(found).__name__ == "_ExcludedModule"
                skipped[name] = "excluded by exclude_modules" if excluded else "not a target"
            continue
        if not linear:
            if isinstance(config.target_modules, str):
                continue  # a regular expression may well match containers
            raise ValueError(
                f"target module {name} is a {type(module).__name__}; only nn.Linear and "
                "transformers' Conv1D can be converted. Name the linear layers inside it"
            )
        if name == head:
            skipped[name] = "output head"
        elif name in tied:
            if not everything:
                raise ValueError(
                    f"target module {name} shares its weight with {tied[name]}; converting it "
                    f"would untie them. Take it out of target_modules"
                )
            skipped[name] = f"weight tied to {tied[name]}"
        elif reason := _kept_block(model, name, config):
            skipped[name] = reason
        else:
            names.append(name)
    if not names:
        why = "; ".join(f"{n}: {r}" for n, r in list(skipped.items())[:5])
        raise ValueError(
            f"target_modules={config.target_modules!r} selects no layer of "
            f"{type(model).__name__}. Its linear layers: {', '.join(_suffixes(linears))}. {why}"
        )
    return Selection(tuple(names), skipped)


def linear_like(module: nn.Module) -> bool:
    """A subclass of nn.Linear or Conv1D: converting it could lose what the subclass adds."""
    return isinstance(module, nn.Linear | Conv1D) and type(module) not in (nn.Linear, Conv1D)


def _suffixes(linears: dict[str, nn.Module]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in linears})


def _head_name(model: nn.Module) -> str | None:
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if head is None:
        return None
    return next((name for name, module in model.named_modules() if module is head), None)


def _tied_weights(model: nn.Module) -> dict[str, str]:
    """Modules whose weight is the same Parameter as another module's: name -> the other's name."""
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        other = owners.setdefault(id(weight), name)
        if other != name:
            tied[name], tied[other] = other, name
    # On the meta device tied parameters are not shared yet; transformers knows which will be.
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        target, source = target.removesuffix(".weight"), source.removesuffix(".weight")
        tied.setdefault(target, source)
        tied.setdefault(source, target)
    return tied


def _kept_block(model: nn.Module, name: str, config: MetisConfig) -> str | None:
    """The reason why the block policy keeps `name` in high precision, or None."""
    if not (config.keep_first_blocks or config.keep_last_blocks):
        return None
    for match in re.finditer(r"\.(\d+)(?=\.)", name):
        blocks = model.get_submodule(name[: match.start()])
        if isinstance(blocks, nn.ModuleList):
            index, count = int(match.group(1)), len(blocks)
            if index < config.keep_first_blocks:
                return f"keep_first_blocks={config.keep_first_blocks}"
            if index >= count - config.keep_last_blocks:
                return f"keep_last_blocks={config.keep_last_blocks}"
            return None
    return None
