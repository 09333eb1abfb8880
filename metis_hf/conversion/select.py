"""Selects the modules of a model to convert, and gives reasons for leaving out the others.

`candidates` finds convertible modules; `matching` matches names. A module that is registered in
several places has several names, and the config may use any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from metis_hf.config import MetisConfig
from metis_hf.conversion.candidates import AS_THEY_ARE, Naming, find_candidates
from metis_hf.conversion.heads import find_heads, find_routers
from metis_hf.conversion.matching import EXCLUDED, NameRules, ends
from metis_hf.shared.patterns import containing_pattern, matching_pattern, name_pattern

_NO_LINEAR = (
    "only nn.Linear, transformers' Conv1D and fused experts can be converted. Name the linear "
    "layers inside it"
)


@dataclass(frozen=True)
class Selection:
    """The modules to convert, and the modules that stay in high precision, with the reason.

    Attributes:
        linears: names of nn.Linear and Conv1D modules to convert.
        experts: names of fused expert weights to convert.
        skipped: names of the other linear layers and matrices -> reason.
        tied: names of `linears` that share their weight -> name of the other module.
        called: selected name -> the names that the config may use, first registered name first.
    """

    linears: tuple[str, ...]
    experts: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    called: dict[str, tuple[str, ...]] = field(default_factory=dict)


def select_modules(
    model: nn.Module,
    config: MetisConfig,
    *,
    check_names: bool = True,
    naming: Naming = AS_THEY_ARE,
) -> Selection:
    """Apply target_modules, exclude_modules and the block policy to a model.

    Args:
        model: any module.
        config: the selection to apply.
        check_names: refuse names and patterns that match nothing. Off for checkpoints: their names
            were checked at conversion, and a submodel may be loaded without the head they name.
        naming: how the config names the modules.

    Raises:
        ValueError: no layer is selected; a target is not a linear layer; a pattern or name of the
            config matches nothing.
    """
    candidates, skipped = find_candidates(model, config, naming)
    if not candidates:
        why = "".join(f". {name}: {reason}" for name, reason in list(skipped.items())[:5])
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer and no fused experts; there "
            f"is nothing to convert{why}"
        )
    rules = NameRules(config)
    tied = _tied_weights(model)
    unless_named = {  # kept in high precision unless target_modules lists them
        **dict.fromkeys(find_routers(model), "router"),
        **dict.fromkeys(find_heads(model), "output head"),
        **{name: f"weight tied to {other}" for name, other in tied.items()},
    }
    selected: list[str] = []
    for name, candidate in candidates.items():
        reason = _verdict(rules, candidate.called)
        if not any(map(rules.names, candidate.called)):
            reason = reason or unless_named.get(name)
        if reason := reason or _kept_block(model, name, config):
            skipped[name] = reason
        else:
            selected.append(name)
            full = [each for each in candidate.called if rules.names_in_full(each)]
            if full and config.layers_to_transform:
                raise ValueError(
                    f"target_modules names {full[0]} in full, so layers_to_transform does not "
                    "apply to it; use only the last part of the name, or omit layers_to_transform"
                )
    names = [name for candidate in candidates.values() for name in candidate.called]
    if check_names:
        modules = {naming(name): name for name, _ in model.named_modules(remove_duplicate=False)}
        _check_targets(model, config, modules, names, skipped)
        converted = [each for name in selected for each in candidates[name].called]
        layers = {*names, *map(naming, skipped)}
        _check_excluded(model, config, set(modules), layers, converted)
        _check_layers(model, config, rules, names)
        _check_blocks(model, config, candidates)
    if not selected:
        why = "; ".join(f"{n}: {r}" for n, r in list(skipped.items())[:5])
        raise ValueError(
            f"target_modules={config.target_modules!r} selects no layer of "
            f"{type(model).__name__}. Its linear layers: {', '.join(_suffixes(names))}. {why}"
        )
    called = {name: candidates[name].called for name in selected}
    if check_names:
        _check_patterns(config, [each for names in called.values() for each in names])
    return Selection(
        linears=tuple(name for name in selected if not candidates[name].fused),
        experts=tuple(name for name in selected if candidates[name].fused),
        skipped=skipped,
        tied={name: tied[name] for name in selected if name in tied},
        called=called,
    )


def _verdict(rules: NameRules, called: tuple[str, ...]) -> str | None:
    """Return why the config does not select a module with these names; None: it does."""
    reasons = [rules.why_not(name) for name in called]
    for reason in reasons:
        if reason in EXCLUDED:
            return reason
    return None if None in reasons else reasons[0]


def _check_targets(
    model: nn.Module,
    config: MetisConfig,
    modules: dict[str, str],
    candidates: list[str],
    skipped: dict[str, str],
) -> None:
    """Refuse names in target_modules and modules_to_not_convert that match nothing."""
    if not isinstance(config.target_modules, str):
        known = {end for name in candidates for end in ends(name)}
        for target in config.target_modules:
            if target in known:
                continue
            other = next((name for name in modules if name and target in ends(name)), None)
            if other is not None:
                module = model.get_submodule(modules[other])
                first = next(name for name, each in model.named_modules() if each is module)
                raise ValueError(
                    f"target module {other} is a {type(module).__name__}; "
                    f"{skipped.get(first, _NO_LINEAR)}"
                )
            raise ValueError(
                f"target_modules names {target!r}, which is not a module of "
                f"{type(model).__name__}. Its linear layers: {', '.join(_suffixes(candidates))}"
            )
    everywhere = (*modules, *candidates)
    for keep in config.modules_to_not_convert or ():
        if not any(map(containing_pattern(keep).match, everywhere)):
            raise ValueError(
                f"modules_to_not_convert names {keep!r}, which matches no module of "
                f"{type(model).__name__}; the module it was meant to keep would be converted"
            )


def _check_excluded(
    model: nn.Module, config: MetisConfig, modules: set[str], layers: set[str], selected: list[str]
) -> None:
    """Refuse entries of exclude_modules that match nothing, or only parents of selected layers."""
    pattern = config.exclude_modules
    named: dict[str, set[str]] = {}
    if isinstance(pattern, str):
        matcher = name_pattern(pattern)
        named[pattern] = {name for name in modules | layers if matcher.fullmatch(name)}
    elif pattern is not None:
        named = {entry: set() for entry in pattern}
        for name in modules | layers:
            for entry in named.keys() & ends(name):
                named[entry].add(name)
    for entry, names in named.items():
        if not names:
            means = "matches the full name of" if isinstance(pattern, str) else "is"
            raise ValueError(
                f"exclude_modules has {entry!r}, which {means} no module of "
                f"{type(model).__name__}; the module it was meant to exclude would be converted"
            )
        if not names.isdisjoint(layers):
            continue
        inside = tuple(f"{name}." for name in names if name)
        layer = next((name for name in selected if name.startswith(inside)), None)
        if layer is not None:
            raise ValueError(
                f"exclude_modules has {entry!r}, which names not a layer but a container of layers "
                f"such as {layer}; these would be converted. To exclude a module with everything "
                "inside it, name it in modules_to_not_convert"
            )


def _check_layers(
    model: nn.Module, config: MetisConfig, rules: NameRules, candidates: list[str]
) -> None:
    """Refuse indices in layers_to_transform whose block has no target; PEFT ignores them."""
    blocks = {name: rules.block(name) for name in candidates if rules.names(name)}
    for index in config.layers_to_transform or ():
        if index in blocks.values() or any(map(rules.names_in_full, candidates)):
            continue
        for name, block in blocks.items():
            at_start = re.match(r"(\w+)\.\d+\.", name)
            if block is None and at_start and not config.layers_pattern:
                raise ValueError(
                    f"layers_to_transform has {index}, but by PEFT's rule {name} is in no block: "
                    "without layers_pattern, the name of the block list needs a prefix. Set "
                    f"layers_pattern={at_start[1]!r} too"
                )
        pattern = f" (layers_pattern={config.layers_pattern!r})" * bool(config.layers_pattern)
        raise ValueError(
            f"layers_to_transform has {index}{pattern}, but no block of "
            f"{type(model).__name__} with that index contains a target module"
        )


def _check_blocks(model: nn.Module, config: MetisConfig, candidates: Iterable[str]) -> None:
    """Refuse to keep the first or last blocks of a model that has none."""
    if not (config.keep_first_blocks or config.keep_last_blocks):
        return
    if not any(_block(model, name) for name in candidates):
        raise ValueError(
            f"keep_first_blocks={config.keep_first_blocks}, keep_last_blocks="
            f"{config.keep_last_blocks}: {type(model).__name__} has no list of blocks (ModuleList "
            "or Sequential); name the layers in exclude_modules instead"
        )


def _check_patterns(config: MetisConfig, selected: list[str]) -> None:
    """Refuse a pattern that applies to no layer: a typo, or shadowed by an earlier pattern."""
    for option in ("rank_pattern", "scheme_pattern"):
        patterns = getattr(config, option)
        used = {matching_pattern(patterns, name) for name in selected}
        for pattern in patterns:
            if pattern not in used:
                raise ValueError(
                    f"{option} has {pattern!r}, which applies to no converted layer. The converted "
                    f"layers are: {', '.join(_suffixes(selected))}"
                )


def _suffixes(names: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def _tied_weights(model: nn.Module) -> dict[str, str]:
    """Return modules that share their weight Parameter: name -> name of the other module."""
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        other = owners.setdefault(id(weight), name)
        if other != name:
            tied[name], tied[other] = other, name
    # On the meta device tied parameters are not shared yet; transformers lists those that will be.
    modules = dict(model.named_modules(remove_duplicate=False))
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        target, source = target.removesuffix(".weight"), source.removesuffix(".weight")
        if target in modules and modules[target] is modules.get(source):
            continue  # one module in two places
        tied.setdefault(target, source)
        tied.setdefault(source, target)
    return tied


def _kept_block(model: nn.Module, name: str, config: MetisConfig) -> str | None:
    """Return the reason why the block policy keeps `name` in high precision, or None."""
    if not (config.keep_first_blocks or config.keep_last_blocks):
        return None
    found = _block(model, name)
    if found is None:
        return None
    index, count = found
    if index < config.keep_first_blocks:
        return f"keep_first_blocks={config.keep_first_blocks}"
    if index >= count - config.keep_last_blocks:
        return f"keep_last_blocks={config.keep_last_blocks}"
    return None


def _block(model: nn.Module, name: str) -> tuple[int, int] | None:
    """Return (index of the layer's block, number of blocks); None: it is not in a block list."""
    # The outermost ModuleList counts; without one, the outermost Sequential.
    for kind in (nn.ModuleList, nn.Sequential):
        for match in re.finditer(r"(?:^|\.)(\d+)(?=\.)", name):
            blocks = model.get_submodule(name[: match.start()])
            if isinstance(blocks, kind):
                return int(match.group(1)), len(blocks)
    return None
