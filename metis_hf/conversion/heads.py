"""Output heads and routers, which "all-linear" and regular expressions do not select."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from metis_hf.conversion.linears import is_linear
from metis_hf.layers.experts import is_fused_experts

# Class names of submodels with a head after their base. Other submodels may have a part with a
# base's name and further parts that are not heads (VideoPrism's vision model).
_HAS_HEAD = re.compile(r"For[A-Z]|LMHead")
# Models without a base whose top-level linear layers are the head. In other models such layers
# connect parts: `language_projection` of BLIP-2.
_TOP_IS_HEAD = re.compile(r"For\w*(Classification|QuestionAnswering|CTC)$")
# MixtralTopKRouter, SwitchTransformersTop1Router, and the other routers in transformers.
_ROUTER_CLASS = re.compile(r"Router|TopKGating$|MoE\w*Gate$")
_ROUTER_NAMES = ("router", "router_gate")  # names of linear layers; router_gate is Doge's


def output_head(model: nn.Module) -> Any:
    """Return the output embeddings of a model; None if it has none."""
    find: Any = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def find_heads(model: nn.Module) -> set[str]:
    """Return the names of the linear layers after base models: output embeddings, classifiers, ...

    Heads of submodels are included, such as the head of an EncoderDecoderModel's decoder.
    """
    inner = (each for each in model.modules() if isinstance(each, PreTrainedModel))
    heads = {layer for each in {model, *inner} for layer in _behind(each, inner=each is not model)}
    return {name for name, module in model.named_modules() if module in heads and is_linear(module)}


def _behind(model: Any, *, inner: bool) -> Iterator[nn.Module]:
    """Yield the output embeddings of a model and the modules outside its base."""
    head = output_head(model)
    if isinstance(head, nn.Module):
        yield from head.modules()  # Musicgen's is a list
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
    """Return whether the class name says that the module is a router."""
    return _ROUTER_CLASS.search(type(module).__name__) is not None


def find_routers(model: nn.Module) -> set[str]:
    """Return the names of the linear layers that choose or weigh experts.

    These are the linear layers inside a router class, those with a router's name, and siblings of
    fused experts with at most as many outputs as there are experts.
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
