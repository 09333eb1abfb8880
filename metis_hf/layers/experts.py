"""Fused experts of mixture-of-experts models: one quantized layer for each expert.

transformers stores the experts of a layer as 3-D parameters and dispatches their forward pass
through its experts interface. Conversion replaces a fused parameter such as `down_proj` by a
ModuleList `metis_down_proj` with one of the layers in `linear` per expert. It also gives the module
its own copy of the config, which selects the implementation registered here; experts that stay in
high precision run as before. Each expert quantizes its own weight and its own tokens. The prefix
`metis_` keeps the names from matching the patterns by which transformers converts checkpoints.

Packed checkpoints store the gate and up projections as two matrices. Their experts have ModuleLists
`packed_gate_proj`, `packed_up_proj` and `packed_down_proj` of `PackedLinear`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from metis_hf.layers.initializers import apply_to_experts
from metis_hf.layers.parallelism import EXPERT, FSDP2_INSTEAD, is_hooked

IMPLEMENTATION = "metis"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_PREFIX = "metis_"
_PACKED = "packed_"


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether transformers' experts interface runs this module."""
    declared = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    return declared and bool(fused_weights(module) or converted_names(module))


def has_fused_experts(model: nn.Module) -> bool:
    """Return whether a model has fused experts."""
    return any(is_fused_experts(module) for module in model.modules())


def fused_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the 3-D weights of fused experts by name, up projection first; [e o i] or [e i o]."""
    params = {name: module._parameters.get(name) for name in _WEIGHTS}
    return {name: param for name, param in params.items() if param is not None and param.dim() == 3}


def fused_bias(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the 2-D bias [e o] that belongs to a fused weight."""
    return module._parameters.get(f"{name}_bias")


def expert_shape(module: nn.Module, name: str) -> tuple[int, int]:
    """Return (in_features, out_features) of one expert's matrix."""
    _, rows, columns = fused_weights(module)[name].shape
    return (rows, columns) if module.is_transposed else (columns, rows)


def replace_fused(module: nn.Module, name: str, layers: Sequence[nn.Module]) -> None:
    """Replace a fused weight and its bias by one layer per expert."""
    _put_lists(module, name, {_PREFIX + name: layers})


def replace_packed(module: nn.Module, name: str, layers: Mapping[str, Sequence[nn.Module]]) -> None:
    """Replace a fused weight by packed layers: one per expert for each of `parts_of`."""
    _put_lists(module, name, {_PACKED + part: each for part, each in layers.items()})


def _put_lists(module: nn.Module, name: str, lists: Mapping[str, Sequence[nn.Module]]) -> None:
    del module._parameters[name]
    module._parameters.pop(f"{name}_bias", None)
    for key, layers in lists.items():
        module.add_module(key, nn.ModuleList(layers))
    if not hasattr(module, "_dense_config"):
        module._dense_config = module.config
        module.config = copy.deepcopy(module.config)
        module.config._experts_implementation = IMPLEMENTATION  # type: ignore[union-attr]
        # `Module.apply` would initialize the module without its fused weights.
        module.apply = functools.partial(_apply, module)  # type: ignore[method-assign]
    module._is_hf_initialized = True  # type: ignore[assignment]  # its own initializer would look for the fused weight


def fuse_again(module: nn.Module, name: str) -> None:
    """Undo `replace_fused`: stack the weights that the layers represent.

    The fused weight is trainable if any expert's weight is.
    """
    layers: Any = layers_of(module, name)
    del module._modules[_PREFIX + name]
    weights = [layer.weight_form.dense(layer.weight_params()).detach() for layer in layers]
    trainable = any(layer.weight_params()[-1].requires_grad for layer in layers)
    _fuse(module, name, weights, trainable)
    if layers[0].bias is not None:
        bias = torch.stack([layer.bias.detach() for layer in layers])
        trainable = any(layer.bias.requires_grad for layer in layers)
        module.register_parameter(f"{name}_bias", nn.Parameter(bias, requires_grad=trainable))
    _leave(module)


def unpack_again(module: nn.Module, name: str) -> None:
    """Undo `replace_packed`: stack the weights that the packed layers represent."""
    lists: list[Any] = [module._modules.pop(_PACKED + part) for part in parts_of(module, name)]
    _fuse(module, name, [_join(module, [e.weight.T for e in each]).T for each in zip(*lists)], True)
    if lists[0][0].bias is not None:
        bias = torch.stack([_join(module, [e.bias.detach() for e in each]) for each in zip(*lists)])
        module.register_parameter(f"{name}_bias", nn.Parameter(bias))
    _leave(module)


def _fuse(module: nn.Module, name: str, weights: list[Tensor], trainable: bool) -> None:
    fused = torch.stack([w.T for w in weights] if module.is_transposed else weights)
    module.register_parameter(name, nn.Parameter(fused, requires_grad=trainable))


def _leave(module: nn.Module) -> None:
    """Restore the original implementation of experts once all their weights are fused again."""
    if not (converted_names(module) or packed_names(module)):
        module.config = module._dense_config
        del module._dense_config, module.apply


def _apply(module: nn.Module, fn: Callable[[nn.Module], Any]) -> nn.Module:
    """Replace `Module.apply` for experts whose weights are in layers."""
    for child in module.children():
        child.apply(fn)
    fused = {name: list(layers_of(module, name)) for name in converted_names(module)}
    try:
        apply_to_experts(module, fn, fused)
    except AttributeError as error:  # an initializer of packed weights, which are never drawn
        if not any(f"'{name}" in str(error) for name in packed_names(module)):
            raise
    return module


def converted_names(module: nn.Module) -> list[str]:
    """Return names of the fused weights that were replaced in a module; usually none."""
    return [name for name in _WEIGHTS if _PREFIX + name in module._modules]


def layers_of(module: nn.Module, name: str) -> nn.ModuleList:
    """Return the layers, one per expert, that replaced a fused weight."""
    return module._modules[_PREFIX + name]  # type: ignore[return-value]


def packed_names(module: nn.Module) -> list[str]:
    """Return names of the fused weights that packed layers replace in a module; usually none."""
    own = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
    return [key for key in own if _PACKED + parts_of(module, key)[0] in module._modules]


def packed_list(part: str) -> str:
    """Return the attribute that holds the packed layers of one of `parts_of`."""
    return _PACKED + part


def parts_of(module: nn.Module, name: str) -> tuple[str, ...]:
    """Return the names that packed checkpoints give to the parts of a fused weight."""
    return ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)


def part_rows(module: nn.Module, name: str, part: str, out_features: int) -> slice:
    """Return the rows of an expert's fused matrix [o i] that hold one of `parts_of`."""
    parts = parts_of(module, name)
    at, count = parts.index(part), len(parts)
    if not getattr(module, "is_concatenated", True):
        return slice(at, None, count)
    size = out_features // count
    return slice(at * size, (at + 1) * size)


def _join(module: nn.Module, parts: list[Tensor]) -> Tensor:
    """Join the columns of the parts to the columns of a fused projection."""
    if not getattr(module, "is_concatenated", True):
        return torch.stack(parts, -1).flatten(-2)
    return torch.cat(parts, -1)


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run converted experts, with the signature of transformers' experts interface.

    Args:
        module: the experts.
        hidden_states: [t h]
        top_k_index: [t k], the experts of each token.
        top_k_weights: [t k], their routing weights.

    Returns:
        [t h]
    """
    names = converted_names(module)
    if not (names or packed_names(module)):
        raise ValueError(
            f"experts implementation {IMPLEMENTATION!r} is for converted experts, and these are "
            "not converted; get_metis_model selects it automatically"
        )
    parallel = getattr(module, "_is_expert_parallel", False)  # transformers 5.10 does not set it
    if parallel or is_hooked(module):
        raise NotImplementedError(
            f"converted experts cannot be distributed this way: {EXPERT}. {FSDP2_INSTEAD}"
        )
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    tokens, top_k = top_k_index.shape
    expert = top_k_index.reshape(-1)
    order = expert.argsort(stable=True)  # (token, choice) pairs, sorted by expert
    counts = torch.bincount(expert, minlength=module.num_experts).tolist()
    rows = order // top_k
    first: Any = layers_of(module, names[0])[0] if names else None  # all share the model's mask
    mask = first.row_mask(hidden_states) if hasattr(first, "row_mask") else None
    outputs = []
    start = 0
    for index, count in enumerate(counts):
        if not count:
            continue
        mine = rows[start : start + count]
        start += count
        row_mask = None if mask is None else mask[mine]
        h = _project(module, up_name, index, hidden_states[mine], row_mask)
        h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        outputs.append(_project(module, "down_proj", index, h, row_mask))
    y = torch.cat(outputs) if outputs else hidden_states[rows]  # there are no tokens
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    y = y * top_k_weights.reshape(-1)[order, None]
    # Restore the order of the tokens, and sum over their choices without atomics.
    y = y[order.argsort()].view(tokens, top_k, y.shape[-1]).sum(1)
    unvisited = [index for index, count in enumerate(counts) if not count]
    layers = [
        each[index]
        for each in module.children()
        if isinstance(each, nn.ModuleList)
        for index in unvisited
    ]
    params = [param for layer in layers for param in layer.parameters()]
    y = y.to(hidden_states.dtype)
    return _ZeroGradients.apply(y, *params) if params else y


class _ZeroGradients(torch.autograd.Function):
    """Identity in y that gives `params` zero gradients, as unvisited slices of a fused weight get.

    FSDP2 and DDP reduce the same parameters on all ranks, but each rank visits different experts.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        need = ctx.needs_input_grad[1:]
        return dy, *(torch.zeros_like(p) if n else None for p, n in zip(ctx.saved_tensors, need))


def _project(module: Any, name: str, index: int, x: Tensor, row_mask: Tensor | None) -> Tensor:
    if name in converted_names(module):
        layer: Any = layers_of(module, name)[index]
        return layer(x, row_mask=row_mask) if hasattr(layer, "row_mask") else layer(x)
    if name in packed_names(module):
        lists = (module._modules[_PACKED + part] for part in parts_of(module, name))
        return _join(module, [each[index](x) for each in lists])
    weight, bias = getattr(module, name), fused_bias(module, name)
    matrix = weight[index].T if module.is_transposed else weight[index]
    return F.linear(x, matrix, None if bias is None else bias[index])


if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
