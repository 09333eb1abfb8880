"""Refuses unsupported uses of a quantized layer, before torch fails with an obscure error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from metis_hf.layers.parallelism import TENSOR, check_accelerate, is_spread

_DENSE = "metis_hf.to_dense(model) returns a plain model with the same weights, which can"
_TWICE = (
    "second derivatives through a quantized layer do not exist: rounding has none, and the "
    "straight-through gradient is not the gradient of any function. Drop create_graph=True, or "
    'differentiate twice with high_precision=("forward", "backward") (metis_hf.set_precision) or '
    "with the plain model that metis_hf.to_dense(model) returns"
)


def refuse_unsupported(name: str, x: Tensor, params: Sequence[Tensor]) -> None:
    """Check that a call of a quantized layer can run.

    Raises:
        NotImplementedError: torch.jit.trace, a transform of torch.func, forward-mode
            differentiation or context parallelism is running, or a tensor is a DTensor.
        ValueError: the input or the weight is on the meta device.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"torch.jit.trace (and torch.onnx.export with dynamo=False) of {name} is not "
            "supported: how operands are quantized depends on the input, and a trace cannot "
            f"record that. {_DENSE} be traced; torch.compile and torch.export accept the quantized "
            "model"
        )
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{name} inside torch.func (vmap, grad, vjp, jvp, jacrev, ..) is not supported: a "
            "quantized layer defines its own backward pass and has no rule for batches or "
            "tangents. Take gradients with backward() or torch.autograd.grad; instead of vmap, "
            f"loop or add rows to the batch. {_DENSE} be transformed"
        )
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in (x, *params)
    ):
        raise NotImplementedError(
            f"forward-mode differentiation of {name} is not supported: a quantized layer only has "
            f"a backward pass. Use backward() or torch.autograd.grad; {_DENSE} take tangents"
        )
    check_accelerate()
    for what, tensor in (("the input", x), ("the weight", params[-1])):
        if is_spread(tensor):
            raise NotImplementedError(
                f"{what} of {name} is a DTensor, so each process holds only a part of it: "
                f"{TENSOR}. Shard the model with FSDP2, which gathers weights before they are used"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{what} of {name} is on the meta device and has no values to quantize. Before "
                "calling the model, load it with from_pretrained, or allocate memory with "
                "model.to_empty(device=..) and load values with load_state_dict"
            )


def refuse_batched_gradients(dy: Tensor) -> None:
    """Check that a backward pass gets one gradient.

    Raises:
        NotImplementedError: it gets a batch of them, from `is_grads_batched` or `vectorize`.
    """
    if torch.compiler.is_compiling():
        return
    functorch = torch._C._functorch
    if functorch.is_legacy_batchedtensor(dy) or functorch.is_batchedtensor(dy):
        raise NotImplementedError(
            "batched gradients (is_grads_batched=True, vectorize=True) of a quantized layer are "
            "not supported: the quantizers take one matrix. Compute one gradient at a time"
        )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward function so that differentiating its results raises a clear error.

    The message of `torch.autograd.function.once_differentiable` gives neither reason nor remedy.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if not torch.is_grad_enabled() or not any(g.requires_grad for g in grads):
            return outputs
        refuse: Any = torch._C._functions.DelayedError(_TWICE.encode(), len(outputs))
        return refuse(*(None if g is None else g.detach().requires_grad_() for g in outputs))

    return wrapper
