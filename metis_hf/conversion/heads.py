"""Layers that "all-linear" and regular expressions leave as they are: output heads and routers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from metis_hf.conversion.linears import is_linear
from metis_hf.layers.experts import is_fused_experts

# Of models inside a model those with a head have one behind their base. Others have a part that is
# named as bases are, and more parts beside it (VideoPrism's vision model).
_HAS_HEAD = re.compile(r"For[A-Z]|LMHead")
# Models without a base of their own, whose linear layers at the top are the head. In other models
# these lie between parts: `language_projection` of BLIP-2.
_TOP_IS_HEAD = re.compile(r"For\w*(Classification|QuestionAnswering|CTC)$")
# MixtralTopKRouter, SwitchTransformersTop1Router, ...; the others that transformers has.
_ROUTER_CLASS = re.compile(r"Router|TopKGating$|MoE\w*Gate$")
_ROUTER_NAMES = ("router", "router_gate")  # of linear layers: Doge's


def find_heads(model: nn.Module) -> set[str]:
    """Return linear layers behind base models: output embeddings, classifiers, ...

    Heads of models inside the model are included, such as the decoder of an EncoderDecoderModel.
    """
    inner = (each for each in model.modules() if isinstance(each, PreTrainedModel))
    heads = {layer for each in {model, *inner} for layer in _behind(each, inner=each is not model)}
    return {name for name, module in model.named_modules() if module in heads and is_linear(module)}


def _behind(model: Any, *, inner: bool) -> Iterator[nn.Module]:
    """Yield the modules behind the base of a model."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if isinstance(head, nn.Module):
        yield from head.modules()  # of Musicgen it is a list
    if not isinstance(model, PreTrainedModel):
        return
    base, name = model.base_model, type(model).__name__
    if base is model:
        if _TOP_IS_HEAD.search(name):
            yield from (child for child in model.children() if is_linear(child))
    elif not inner or _HAS_HEAD.search(name):
        inside = set(base.modules())
        yield from (module for module in model.modules() if module not in inside)


def is_router(module: nn.Module) -> bool:
    """Return whether a module says by its class that it chooses experts."""
    return _ROUTER_CLASS.search(type(module).__name__) is not None


def find_routers(model: nn.Module) -> set[str]:
    """Return the linear layers that choose or weigh experts.

    Those inside a module whose class says so, those that have a router's name, and those beside
    fused experts that are as narrow as there are experts.
    """
    routers: set[str] = set()
    for name, module in model.named_modules():
        if is_router(module):
            inside = (key for key, child in module.named_modules() if isinstance(child, nn.Linear))
            routers.update(f"{name}.{key}".strip(".") for key in inside)
        experts = [child for child in module.children() if is_fused_experts(child)]
        widest = experts[0].num_experts if experts else 0
        for key, child in module.named_children():
            if isinstance(child, nn.Linear) and (
                key in _ROUTER_NAMES or child.out_features <= widest  # type: ignore[operator]
            ):
                routers.add(f"{name}.{key}".removeprefix("."))
    return routers
