"""Errors of each layer by itself: of its operands and products, on exact inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from metis_hf.lab.fidelity.gradients import on_calls, run_batches
from metis_hf.lab.fidelity.subject import running
from metis_hf.layers.linear import MetisLayer
from metis_hf.numerics import sqnr_db
from metis_hf.operands import HIGH_PRECISION, Operand, Spectral
from metis_hf.schemes import Role, Scheme
from metis_hf.training.health import plan_of_call
from metis_hf.training.uncalled import READ_INSTEAD, by_kind

logger = logging.get_logger(__name__)

KINDS = {  # kind of operand -> its roles
    "input": (Role.FPROP_INPUT, Role.WGRAD_INPUT),
    "weight": (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT),
    "grad_output": (Role.DGRAD_GRAD_OUTPUT, Role.WGRAD_GRAD_OUTPUT),
}


@dataclass(frozen=True)
class Unrounded(Spectral):
    """A spectral split without rounding: the exact matrix, and the low-rank part of its split.

    The scheme may correct the other operand of the GEMM along the directions of that part.
    """

    has_codes = False

    def with_factors(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32):
        _, low = super().with_factors(
            x, quantizer, dim=dim, key=key, row_mask=row_mask, dtype=dtype
        )
        return x.to(dtype), low


def only(scheme: Scheme, kind: str) -> Scheme:
    """Return a scheme that quantizes operands of one kind only; see `KINDS`.

    Their corrections along the directions of the other operand stay, unless the other operand is a
    weight that is stored split.
    """
    changes: dict[str, Any] = {}
    for other in KINDS:
        for role in KINDS[other]:
            operand = scheme.operand(role)
            if other != kind and operand is not None:
                changes[role.name.lower()] = _unrounded(operand)
    corrected = scheme.corrected.intersection(KINDS[kind])
    if scheme.weight.is_split and kind != "weight":
        corrected = corrected - {role for role in corrected if Role(role ^ 1) in KINDS["weight"]}
    return replace(scheme, **changes, corrected=frozenset(corrected))


def _unrounded(operand: Operand) -> Operand:
    split = operand.conditioner
    if operand.quantizer is None or not isinstance(split, Spectral):
        return HIGH_PRECISION
    fields = {field.name: getattr(split, field.name) for field in dataclasses.fields(Spectral)}
    return replace(operand, conditioner=Unrounded(**fields))


def layer_errors(
    model: PreTrainedModel,
    layers: dict[str, MetisLayer],
    weights: dict[str, nn.Parameter],
    rows: Tensor,
) -> dict[str, dict[str, float]]:
    """Measure every layer in its scheme on the exact model's inputs and output gradients.

    `weights` are the layers' parameters whose gradients are compared; `rows` are the token ids
    [b length] of one batch.

    Returns:
        layer -> "input", "weight", "grad_output": SQNR in decibels; "y", "dx", "dw": relative
        errors. In the order of `layers`, without layers that saw no token.
    """
    schemes = {name: layer.scheme for name, layer in layers.items()}
    found: dict[str, list[dict[str, float]]] = {}

    def measure(name: str, x: Tensor, dy: Tensor, mask: Tensor | None) -> None:
        layer = layers[name]
        with running({name: layer}, {name: schemes[name]}):
            found.setdefault(name, []).append(_layer_error(layer, weights[name], x, dy, mask))

    with on_calls(layers, measure), running(layers):
        run_batches(model, list(weights.values()), [rows], lambda _: None)
    if uncalled := [name for name in layers if name not in found]:
        logger.warning_once(
            "fidelity has no errors of %s: no token reached them. This is expected for experts "
            "to which no token was routed. Otherwise %s, so they are not quantized",
            by_kind(uncalled),
            READ_INSTEAD,
        )
    # Backward hooks filled `found` from the last layer to the first.
    return {
        name: {key: fmean(call[key] for call in found[name]) for key in found[name][0]}
        for name in layers
        if name in found
    }


def _layer_error(
    layer: MetisLayer, weight: nn.Parameter, x: Tensor, dy: Tensor, mask: Tensor | None
) -> dict[str, float]:
    layer.train()
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = layer(leaf, row_mask=mask)
        dx, dw = torch.autograd.grad(y, (leaf, weight), dy)
        with running({"": layer}):
            exact = layer(leaf)
            exact_dx, exact_dw = torch.autograd.grad(exact, (leaf, weight), dy)
    errors = {
        "y": _relative(y.detach(), exact.detach()),
        "dx": _relative(dx, exact_dx),
        "dw": _relative(dw, exact_dw),
    }
    return _operand_sqnr(layer, x, dy, mask) | errors


@torch.no_grad()
def _operand_sqnr(
    layer: MetisLayer, x: Tensor, dy: Tensor, mask: Tensor | None
) -> dict[str, float]:
    plan = plan_of_call(layer, x, mask, x.dtype)
    params = layer.weight_params()
    x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    dense = layer.weight_form.dense(params)
    return {
        "input": _sqnr(x, plan.matrix_operand(Role.FPROP_INPUT, x)),
        "grad_output": _sqnr(dy, plan.matrix_operand(Role.DGRAD_GRAD_OUTPUT, dy)),
        "weight": _sqnr(dense, plan.weight_operand(Role.FPROP_WEIGHT, params)),
    }


def _sqnr(x: Tensor, x_hat: Any) -> float:
    values = x_hat.values if x_hat.scale is None else x_hat.values * x_hat.scale
    return float(sqnr_db(x.float(), values[: x.shape[0], : x.shape[1]].float()))


def _relative(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).float().norm() / exact.float().norm().clamp_min(1e-30))
