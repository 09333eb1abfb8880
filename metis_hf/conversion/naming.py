"""Maps names when a checkpoint is loaded by a different class than the one that saved it.

Layers of the base have a prefix in classes with a head ("model.layers.0") and none in the base
class ("layers.0"). A config's patterns use the names of the class that was converted; they must
select the same layers in both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from safetensors import safe_open
from torch import Tensor

from metis_hf.config import MetisConfig
from metis_hf.conversion.candidates import AS_THEY_ARE, Naming
from metis_hf.conversion.select import select_modules
from metis_hf.layers.experts import converted_names

# Parts of tensors from the checkpoint shards read so far: model -> name -> key -> (pattern of
# transformers' converter, part).
_WAITING: MutableMapping[Any, dict[str, dict[str, tuple[str, Tensor]]]] = WeakKeyDictionary()


def saved_naming(model: Any, config: MetisConfig, files: Iterable[str]) -> Naming:
    """Find the names that a config uses for the modules of a model that is about to be loaded.

    The names in the files are tried first. If the config's names and patterns do not all match, the
    other naming is tried: the checkpoint was converted in the other class and saved again.

    Args:
        model: without weights.
        config: of the checkpoint.
        files: of the checkpoint; only safetensors files are read.
    """
    prefix = model.base_model_prefix
    if not prefix:
        return AS_THEY_ARE
    has_head = hasattr(model, prefix)

    def other(name: str) -> str:
        return name.removeprefix(f"{prefix}.") if has_head else f"{prefix}.{name}"

    either: list[Naming] = [AS_THEY_ARE, other]
    if _renamed(model, files):
        either.reverse()
    for naming in either:
        with suppress(ValueError):  # a name matches nothing
            select_modules(model, config, naming=naming)
            return naming
    return either[0]  # a submodel without the head that the config names


def as_in_model(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors under the model's names and in its layout.

    `save_pretrained` renames tensors and splits fused experts. If a shard has only some parts of a
    tensor, the parts are kept until later calls complete the tensor. If the model has layers in
    place of a fused weight (`weights_in_layers`), parts are not kept: the last part is returned
    under the weight's name.

    Args:
        model: a transformers model.
        tensors: of a checkpoint or one of its shards, by the names in the file; names that the
            model has are left unchanged.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    own = model.state_dict()
    if tensors.keys() <= own.keys():
        return dict(tensors)
    renamings, converters = name_mapping(model, getattr(model, "_weight_conversions", None))
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, Tensor] = {}
    waiting = _WAITING.setdefault(model, {})
    in_layers = weights_in_layers(model)
    known = {**own, **dict.fromkeys(in_layers, True)}
    for key in sorted(tensors, key=dot_natural_key):  # experts in numeric order
        tensor = tensors[key]
        if key in own:
            found[key] = tensor
            continue
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if name in in_layers:
            found[name] = tensor
        elif pattern is None:
            found[name if name in own else key] = tensor
        else:
            waiting.setdefault(name, {})[key] = (pattern, tensor)
    for name, parts in list(waiting.items()):
        converter = copy.deepcopy(by_pattern[next(iter(parts.values()))[0]])
        for key in sorted(parts, key=dot_natural_key):
            pattern, part = parts[key]
            converter.add_tensor(name, key, pattern, part)  # type: ignore[arg-type]
        if whole := _converted(converter, name, model, own):
            found |= whole
            del waiting[name]
    return found


def weights_in_layers(model: Any) -> set[str]:
    """Return the names of fused expert weights that the model replaces with converted layers."""
    return {
        f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        for key in converted_names(module)
    }


def _converted(
    converter: Any, name: str, model: Any, own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert tensors; return {} while parts are missing."""
    try:
        made = converter.convert(name, model=model, config=model.config)
    except (RuntimeError, ValueError, IndexError):  # parts are missing
        return {}
    made = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
    fits = all(key in own and own[key].shape == value.shape for key, value in made.items())
    return made if fits else {}


def _renamed(model: Any, files: Iterable[str]) -> bool:
    """Return whether transformers adds the base prefix to the files' names, or removes it."""
    from transformers.core_model_loading import rename_source_key

    mapping = name_mapping(model)
    state = model.state_dict()
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118, no dict
                name, _ = rename_source_key(key, *mapping, model.base_model_prefix, state)
                if name in state:
                    return name != rename_source_key(key, *mapping)[0]
    return False


def name_mapping(model: Any, mapping: list[Any] | None = None) -> tuple[list[Any], list[Any]]:
    """Return transformers' (renamings, converters) for a model's checkpoint tensors."""
    # Imported here: transformers' models import its quantizers, which import this package.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    if mapping is None:
        mapping = get_model_conversion_mapping(model, None, None)
    kinds = WeightRenaming, WeightConverter
    renamings, converters = ([each for each in mapping if isinstance(each, k)] for k in kinds)
    return renamings, converters
