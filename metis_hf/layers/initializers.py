"""Weight initializers on converted layers: `Module.apply` also shows them the plain layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metis_hf.layers.parallelism import is_sharded
from metis_hf.noise import fingerprint
from metis_hf.operands import SplitWeight

Mark = list[tuple[int, int, int]]


def mark_of(tensors: Iterable[Tensor]) -> Mark:
    """Return a mark of tensors that changes when one is written to, even through `.data`."""
    return [
        (t.data_ptr(), 0 if t.is_inference() else t._version, int(fingerprint(t))) for t in tensors
    ]


def apply_to_layer(layer: Any, fn: Callable[[nn.Module], Any]) -> None:
    """Call `fn`, the argument of `Module.apply`, with a converted layer and with its plain layer.

    If `fn` does not change the parameters of the converted layer, it is also called with the plain
    layer, which `_init_weights` and the like look for. The converted layer then takes the weight
    that `fn` wrote.

    Raises:
        NotImplementedError: `fn` is an initializer, and the layer's factors are sharded, or `fn`
            would write to `weight` from outside the layer.
    """
    params = layer.weight_params()
    if any(param.is_meta for param in params):
        fn(layer)  # nothing to initialize yet
        return
    loaded = _is_loaded(layer)
    if layer.weight_form.is_split and not loaded:
        _refuse_writes(layer, fn)
    if any(map(is_sharded, layer.parameters())):
        fn(layer)
        if not layer.weight_form.is_split:
            fn(_plain(layer))  # shares the weight
        elif "init" in getattr(fn, "__name__", ""):
            raise NotImplementedError(
                f"{layer.name or 'a converted layer'} stores its weight in factors that are "
                "sharded over processes, so it cannot be initialized again. Call the initializer "
                "before the model is sharded"
            )
        return
    before = mark_of(params)
    fn(layer)
    if mark_of(params) != before:
        return
    plain = _plain(layer)
    weight: Any = plain.weight
    if layer.weight_form.is_split and loaded:
        weight._is_hf_initialized = True  # transformers skips marked weights
    before, trains = mark_of([weight]), weight.requires_grad
    fn(plain)
    if plain.weight is not weight or mark_of([weight]) != before:
        w = plain.weight.detach()
        take_weight(layer, w.T if layer.conv1d else w, plain.bias)
    if layer.weight_form.is_split and plain.weight.requires_grad != trains:
        for param in params:
            param.requires_grad_(not trains)


def _plain(layer: Any) -> Any:
    plain = layer.to_dense()
    return layer.origin.restore(plain) if layer.origin else plain


def apply_to_experts(
    module: Any, fn: Callable[[nn.Module], Any], fused: Mapping[str, Sequence[Any]]
) -> None:
    """Call `fn`, the argument of `Module.apply`, with fused experts whose weights are in layers.

    If `fn` looks for the fused weights, it gets temporary ones, and the layers take its changes.

    Args:
        module: the experts.
        fn: the function.
        fused: name of each weight -> its layers, one per expert.
    """
    try:
        fn(module)
        return
    except AttributeError as error:
        if not any(f"'{name}" in str(error) for name in fused):
            raise
    shown: dict[str, nn.Parameter] = {}
    for name, layers in fused.items():
        weights = [layer.weight_form.dense(layer.weight_params()).detach() for layer in layers]
        parts = [w.T for w in weights] if module.is_transposed else weights
        shown[name] = nn.Parameter(torch.stack(parts))
        if layers[0].bias is not None:
            shown[f"{name}_bias"] = nn.Parameter(torch.stack([each.bias for each in layers]))
        for each in (name, f"{name}_bias") if all(map(_is_loaded, layers)) else ():
            if each in shown:
                shown[each]._is_hf_initialized = True  # type: ignore[attr-defined]
    module._parameters |= shown
    before = mark_of(shown.values())
    try:
        fn(module)
    finally:
        for name in shown:
            del module._parameters[name]
    if mark_of(shown.values()) == before:
        return
    for name, layers in fused.items():
        bias = shown.get(f"{name}_bias")
        for index, layer in enumerate(layers):
            w = shown[name].detach()[index]
            own = None if bias is None else bias.detach()[index]
            take_weight(layer, w.T if module.is_transposed else w, own)


def _is_loaded(layer: Any) -> bool:
    params = layer.parameters(recurse=False)
    return all(getattr(param, "_is_hf_initialized", False) for param in params)


def _refuse_writes(layer: Any, fn: Callable[[nn.Module], Any]) -> None:
    """Refuse an initializer that writes to a layer's weight from the module around it.

    A layer of factors has no weight to write to: GPT-2's scaled draw of `c_proj` would be lost.
    """
    model = getattr(fn, "__self__", None)
    own = layer.name.rpartition(".")[2]
    if own and isinstance(model, nn.Module) and f".{own}.weight" in _source(fn):
        raise NotImplementedError(
            f"{layer.name} stores its weight in factors, but {type(model).__name__} initializes "
            f"{own}.weight from outside the layer, so the new values would be lost. Call the "
            "initializer before the model is converted"
        )


def _source(fn: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(fn)
    except (OSError, TypeError):
        return ""


@torch.no_grad()
def take_weight(layer: Any, w: Tensor, bias: Tensor | None) -> None:
    """Store a weight [o i] and a bias in the layer, and reset the scheme's state."""
    form, params = layer.weight_form, layer.weight_params()
    if isinstance(form, SplitWeight):
        values = form.stored(w, layer.key, params[-1].dtype)
    else:
        values = form.decompose(w, layer.key)
    for param, value in zip(params, values, strict=True):
        param.copy_(value)  # a dense weight is usually copied onto itself
    if layer.bias is not None and bias is not None:
        layer.bias.copy_(bias)
    state = layer.scheme.state
    if state is not None:
        for name, value in state.initial(layer.in_features, layer.out_features).items():
            layer.get_buffer(name).copy_(value)
    layer.evaluation_weight.forget()
