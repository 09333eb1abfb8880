"""Refuses unsupported uses of a quantized layer, before torch fails with an obscure error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from metis_hf.layers.parallelism import TENSOR, check_accelerate, is_spread

_DENSE = "metis_hf.to_dense(model) gives a plain model of the same weights, which can"
_TWICE = (
    "second derivatives through a quantized layer: rounding has none, and the straight-through "
    "gradient is not the gradient of any function. Drop create_graph=True, or differentiate "
    'twice with high_precision=("forward", "backward") (metis_hf.set_precision) or the plain '
    "model of metis_hf.to_dense(model)"
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
            f"torch.jit.trace (and torch.onnx.export with dynamo=False) of {name}: operands are "
            f"quantized by code that depends on the input, which a trace cannot record. {_DENSE} "
            "be traced; torch.compile and torch.export take the quantized one"
        )
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{name} inside torch.func (vmap, grad, vjp, jvp, jacrev, ..): a quantized layer has "
            "a backward pass of its own and no rule for batches or tangents. Take gradients with "
            "backward() or torch.autograd.grad, and loop or add rows to the batch in place of "
            f"vmap; {_DENSE} be transformed"
        )
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in (x, *params)
    ):
        raise NotImplementedError(
            f"forward-mode differentiation of {name}: a quantized layer has a backward pass only. "
            f"Use backward() or torch.autograd.grad; {_DENSE} take tangents"
        )
    check_accelerate()
    for what, tensor in (("the input", x), ("the weight", params[-1])):
        if is_spread(tensor):
            raise NotImplementedError(
                f"{what} of {name} is a DTensor, of which each process holds a part: {TENSOR}. "
                "Shard the model with FSDP2, which gathers weights before they are used"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{what} of {name} is on the meta device and has no values to quantize. Load the "
                "model with from_pretrained, or give it memory with model.to_empty(device=..) and "
                "its values with load_state_dict, before it is called"
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
            "batched gradients (is_grads_batched=True, vectorize=True) of a quantized layer: the "
            "quantizers take one matrix. Ask for one gradient after the other"
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
