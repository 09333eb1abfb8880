"""The three GEMMs of a linear layer with quantized operands, as one autograd function.

    fprop   y  = x_hat @ w_hat.T        [t i] @ [i o] -> [t o]
    dgrad   dx = dy_hat @ w_hat         [t o] @ [o i] -> [t i]
    wgrad   dw = dy_hat.T @ x_hat       [o t] @ [t i] -> [o i]

Quantizers are straight-through, so dw reaches the stored parameters by the chain rule through
w_hat alone. Parameters are saved, never their quantized copies: w_hat is made again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from metis_hf.noise import Key, fingerprint
from metis_hf.schemes.base import Role, Scheme
from metis_hf.weights import WeightForm


class CallKeys:
    """Noise keys of one forward call and its backward: role -> key.

    Weights: (layer key, role, weight). Activations and gradients: also the input. Equal tensors
    give equal noise, so a recomputed forward pass repeats the original exactly.

    Args:
        layer_key: of config seed, layer name and process rank.
        x: the input of the call.
        weight: the stored weight (the residual of a split one).
    """

    def __init__(self, layer_key: Key, x: Tensor, weight: Tensor) -> None:
        self.weight_key = layer_key.with_data(fingerprint(weight))
        self.call_key = self.weight_key.with_data(fingerprint(x))

    def __getitem__(self, role: Role) -> Key:
        is_weight = role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)
        return (self.weight_key if is_weight else self.call_key).fold(16 + role)


@dataclass(frozen=True)
class GemmPlan:
    """What one call of a layer does; the static part is the layer's, the keys are the call's."""

    scheme: Scheme
    weight: WeightForm
    dtype: torch.dtype  # of the GEMMs and the output
    keys: CallKeys
    row_mask: Tensor | None = None

    def weight_operand(self, role: Role, params: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """w_hat [o i] for fprop (blocks along i) or dgrad (along o)."""
        role, operand = self.scheme.resolve(role)
        dim = -1 if role is Role.FPROP_WEIGHT else 0
        return self.weight.quantize(params, operand, dim=dim, key=self.keys[role], dtype=self.dtype)

    def matrix_operand(self, role: Role, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x_hat or dy_hat, for the GEMM that `role` names."""
        role, operand = self.scheme.resolve(role)
        dim = 0 if role in (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT) else -1
        return operand(x, dim=dim, key=self.keys[role], dtype=self.dtype, row_mask=self.row_mask)


def contract(a: Tensor, b: Tensor) -> Tensor:
    """a [m n] @ b [n p]; an operand without the other's padding along n gets zeros there."""
    missing = a.shape[1] - b.shape[0]
    if missing > 0:
        b = F.pad(b, (0, 0, 0, missing))
    elif missing < 0:
        a = F.pad(a, (0, -missing))
    return a @ b


def _rescale(out: Tensor, *scales: Tensor | None) -> Tensor:
    """Applies the tensor scales of the operands to a GEMM's output, in fp32 and once."""
    given = [scale for scale in scales if scale is not None]
    if not given:
        return out
    return out.mul_(given[0] if len(given) == 1 else given[0] * given[1])


class QuantizedGemm(torch.autograd.Function):
    """y = x_hat @ w_hat.T + bias; see the module docstring."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, plan: GemmPlan, *params: Tensor) -> Tensor:
        # x [t i], bias [o] or None, params as plan.weight stores them
        with torch.autocast(x.device.type, enabled=False):
            x_hat, x_scale = plan.matrix_operand(Role.FPROP_INPUT, x)
            w_hat, w_scale = plan.weight_operand(Role.FPROP_WEIGHT, params)
            y = _rescale(contract(x_hat, w_hat.T), x_scale, w_scale)
            if bias is not None:
                y += bias.to(plan.dtype)
        shared_input = plan.scheme.reuses(Role.WGRAD_INPUT)
        ctx.save_for_backward(x_hat if shared_input else x, x_scale, *params)
        ctx.plan, ctx.shared_input, ctx.x_dtype = plan, shared_input, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # dy [t o]
        plan: GemmPlan = ctx.plan
        x, x_scale, *params = ctx.saved_tensors
        need_x, need_bias, _, *need_params = ctx.needs_input_grad
        dx = dbias = None
        dparams: Sequence[Tensor | None] = [None] * len(params)
        with torch.autocast(dy.device.type, enabled=False):
            if need_x or (any(need_params) and plan.scheme.reuses(Role.WGRAD_GRAD_OUTPUT)):
                d_hat, d_scale = plan.matrix_operand(Role.DGRAD_GRAD_OUTPUT, dy)
            if need_x:
                w_hat, w_scale = plan.weight_operand(Role.DGRAD_WEIGHT, params)
                dx = _rescale(contract(d_hat, w_hat), d_scale, w_scale).to(ctx.x_dtype)
            if any(need_params):
                if not plan.scheme.reuses(Role.WGRAD_GRAD_OUTPUT):
                    d_hat, d_scale = plan.matrix_operand(Role.WGRAD_GRAD_OUTPUT, dy)
                x_hat = x
                if not ctx.shared_input:
                    x_hat, x_scale = plan.matrix_operand(Role.WGRAD_INPUT, x)
                dw = _rescale(contract(d_hat.T, x_hat), d_scale, x_scale)
                dparams = plan.weight.gradients(
                    params, dw, plan.scheme.fprop_weight, key=plan.keys[Role.FPROP_WEIGHT]
                )
                dparams = [g if need else None for g, need in zip(dparams, need_params)]
            if need_bias:
                dbias = dy.sum(0).to(ctx.bias_dtype)
        return dx, dbias, None, *dparams
