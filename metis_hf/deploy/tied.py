"""Packed output heads, and other packed layers whose weight another module reads."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import nn
from transformers import PreTrainedModel


def untie(model: PreTrainedModel, packed: Iterable[str]) -> tuple[str, ...]:
    """Give each packed layer of a plain model that shares its weight its own copy, in place.

    The other module, usually the token embedding, keeps the exact weight, as in training. The
    config is set to `tie_word_embeddings=False` so that loaders read both weights; therefore all
    other tied parameters get their own copies too. `packed` has the names of the layers that are
    stored in four bits. The result is a sentence for the report if there is such a layer.
    """
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            users.setdefault(id(weight), []).append(name)
    shared = {name: names for names in users.values() if len(names) > 1 for name in names}
    found = [name for name in packed if name in shared]
    if not found:
        return ()
    for name in found:
        _give_own(model, f"{name}.weight")
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = False
    # Untie the rest too, so that all of it is saved: encoder and decoder embeddings, biases.
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name in tied:
        _give_own(model, name)
    tied.clear()
    others = ", ".join(other for other in shared[found[0]] if other != found[0])
    return (
        f"{found[0]} is packed in four bits, but {others}, which shared its weight, is not, as in "
        "training. They are stored separately, and the config has tie_word_embeddings=false.",
    )


def _give_own(model: nn.Module, name: str) -> None:
    """Replace a parameter by a copy."""
    path, _, key = name.rpartition(".")
    module, param = model.get_submodule(path), model.get_parameter(name)
    own = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    module.register_parameter(key, own)


def head_note(model: PreTrainedModel, packed: Container[str]) -> tuple[str, ...]:
    """Return a sentence for the report if a plain model's output head is packed, else nothing."""
    head = model.get_output_embeddings()
    names = (name for name, module in model.named_modules() if module is head and name in packed)
    return tuple(
        f"{name} is the output head and is packed in four bits, which not every engine supports. "
        "To keep it dense, exclude it when converting the model, or with --exclude if the export "
        "quantizes it."
        for name in names
    )
