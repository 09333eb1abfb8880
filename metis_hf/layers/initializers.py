"""Initializers that `Module.apply` hands around: they look for linear layers, and are shown one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from metis_hf.layers.parallelism import is_sharded
from metis_hf.noise import fingerprint
from metis_hf.operands import SplitWeight

Mark = list[tuple[int, int, int]]


def mark_of(tensors: Iterable[Tensor]) -> Mark:
    """Return a mark of tensors that changes when one is written to, through `.data` too."""
    return [
        (t.data_ptr(), 0 if t.is_inference() else t._version, int(fingerprint(t))) for t in tensors
    ]


def apply_to_layer(layer: Any, fn: Callable[[nn.Module], Any]) -> None:
    """Call `fn`, which `Module.apply` got, with a converted layer, as itself and as it was.

    A function that leaves the layer's parameters alone is called with the plain layer too, which
    `_init_weights` and the like look for: what they write into its weight, the converted layer
    takes. A function that writes into the parameters itself is done.

    Raises:
        NotImplementedError: an initializer, and factors that processes share.
    """
    params = layer.weight_params()
    if any(param.is_meta for param in params):
        fn(layer)  # nothing to draw yet
        return
    if any(map(is_sharded, layer.parameters())):
        fn(layer)
        if not layer.weight_form.is_split:
            fn(_plain(layer))  # has the very weight
        elif "init" in getattr(fn, "__name__", ""):
            raise NotImplementedError(
                f"{layer.name or 'a converted layer'} stores factors that are sharded over "
                "processes, and cannot draw its weight again there. Call the initializer before "
                "the model is sharded"
            )
        return
    before = mark_of(params)
    fn(layer)
    if mark_of(params) != before:
        return
    plain = _plain(layer)
    weight: Any = plain.weight
    if layer.weight_form.is_split and all(
        getattr(param, "_is_hf_initialized", False) for param in layer.parameters(recurse=False)
    ):
        weight._is_hf_initialized = True  # loaded: transformers draws such weights no second time
    before, trains = mark_of([weight]), weight.requires_grad
    fn(plain)
    if plain.weight is not weight or mark_of([weight]) != before:
        _take(layer, plain)
    if layer.weight_form.is_split and plain.weight.requires_grad != trains:
        for param in params:
            param.requires_grad_(not trains)


def _plain(layer: Any) -> Any:
    plain = layer.to_dense()
    return layer.origin.restore(plain) if layer.origin else plain


@torch.no_grad()
def _take(layer: Any, plain: Any) -> None:
    """Take weight and bias of a plain layer; the scheme's state begins again."""
    w = plain.weight.detach()
    w = w.T if layer.conv1d else w  # [o i]
    form, params = layer.weight_form, layer.weight_params()
    if isinstance(form, SplitWeight):
        values = form.stored(w, layer.key, params[-1].dtype)
    else:
        values = form.decompose(w, layer.key)
    for param, value in zip(params, values, strict=True):
        param.copy_(value)  # of one stored matrix mostly itself
    if layer.bias is not None and plain.bias is not None:
        layer.bias.copy_(plain.bias)
    state = layer.scheme.state
    if state is not None:
        for name, value in state.initial(layer.in_features, layer.out_features).items():
            layer.get_buffer(name).copy_(value)
    layer.evaluation_weight.forget()
