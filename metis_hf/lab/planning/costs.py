"""Costs of one converted layer per micro-batch: FLOPs by kind, and what its quantizers move.

Formulas follow the code that they price (`layers.gemm`, `operands.weight_forms`) and are held to it
by tests; those of conditioners stand beside them (`operands.Work`). What layers that read one
tensor share is counted for each of them. A multiplication with addition counts as 2 FLOPs, so
[a b] @ [b c] costs 2abc (Golub & Van Loan, Matrix Computations, section 1.2). Planning whole runs
is in `planning`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from metis_hf.layers.linear import MetisLayer
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import use_kernels
from metis_hf.operands import Operand
from metis_hf.operands.weight_forms import WeightWork
from metis_hf.schemes import Role, Scheme


@dataclass(frozen=True)
class LayerCost:
    """Forward and backward pass of one layer, or of several.

    Attributes:
        gemm: the three GEMMs that the dense layer has too.
        subspace: range finder of activations and gradients on the sampled rows, matrix products.
        factorization: its orthonormal bases and eigenvectors.
        projection: coordinates of every row in that subspace.
        low_rank: putting the low-rank part together again, and taking the residual.
        corrections: rounding errors along thin factors, and their products with the other ones.
        weight_factors: the products with u and vh of split weights, forward and backward.
        elementwise: element operations around the quantizers: means, shifts, scales, clamps.
        rotation: Hadamard and other orthogonal transforms.
        quantizers: element operations of the quantizers; none of them runs on tensor cores.
        quantizer_bytes: what those read and write in unfused PyTorch, in bytes.
    """

    gemm: float = 0
    subspace: float = 0
    factorization: float = 0
    projection: float = 0
    low_rank: float = 0
    corrections: float = 0
    weight_factors: float = 0
    elementwise: float = 0
    rotation: float = 0
    quantizers: float = 0
    quantizer_bytes: float = 0

    @property
    def flops(self) -> float:
        """All kinds together."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "quantizer_bytes")

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(LayerCost))
        )

    def __mul__(self, count: float) -> LayerCost:
        return LayerCost(*(getattr(self, f.name) * count for f in fields(LayerCost)))


def layer_cost(layer: MetisLayer, tokens: int) -> LayerCost:
    """Count a micro-batch of `tokens` rows through a layer in training, forward and backward."""
    return forward_cost(layer, tokens) + backward_cost(layer, tokens)


def forward_cost(layer: MetisLayer, tokens: int) -> LayerCost:
    """Return fprop, [t i] @ [i o] in 2tio FLOPs, and the making of its operands."""
    scheme, i, o = layer.scheme, layer.in_features, layer.out_features
    cost = LayerCost(gemm=2.0 * tokens * i * o)
    if scheme.is_high_precision:
        return cost + _dense_weight_cost(layer)
    cost += _operand_cost(scheme.fprop_input, (tokens, i), -1)
    cost += _weight_cost(layer, scheme.fprop_weight)
    return cost + corrections_cost(layer, tokens, (Role.FPROP_INPUT, Role.FPROP_WEIGHT))


def backward_cost(layer: MetisLayer, tokens: int) -> LayerCost:
    """Count dgrad and wgrad, 2tio each, their operands, and the gradients of u, s, vh."""
    scheme, i, o = layer.scheme, layer.in_features, layer.out_features
    cost = LayerCost(gemm=4.0 * tokens * i * o)
    if scheme.is_high_precision:
        return cost + _dense_weight_cost(layer) * 2  # the gradients of both factors
    cost += _operand_cost(scheme.dgrad_grad_output, (tokens, o), -1)
    role, weight = scheme.resolve(Role.DGRAD_WEIGHT)  # saved nowhere: made again
    cost += _weight_cost(layer, weight, dim=-1 if role is Role.FPROP_WEIGHT else 0)
    if scheme.wgrad_grad_output is not None:
        cost += _operand_cost(scheme.wgrad_grad_output, (tokens, o), 0)
    cost += _wgrad_input_cost(scheme, tokens, i)
    work = _weight_work(layer, scheme.fprop_weight)
    cost += LayerCost(**work.gradients)
    if work.operand and scheme.fprop_weight.quantizer is not None:
        cost += LayerCost(**scheme.fprop_weight.conditioner.work((o, i), dim=-1).gradient)
    cost += _quantizers_cost(scheme.fprop_weight.quantizer, *work.quantized_again)
    backward = (Role.DGRAD_GRAD_OUTPUT, Role.DGRAD_WEIGHT, Role.WGRAD_GRAD_OUTPUT)
    return cost + corrections_cost(layer, tokens, backward)


def corrections_cost(layer: MetisLayer, tokens: int, roles: tuple[Role, ...]) -> LayerCost:
    """Return `gemm`: the error [m n] of an operand along k directions, quantized, times [k p]."""
    t, i, o = tokens, layer.in_features, layer.out_features
    sizes = {  # the corrected operand [m n] of a GEMM [m n] @ [n p]
        Role.FPROP_INPUT: (t, i, o),
        Role.FPROP_WEIGHT: (o, i, t),
        Role.DGRAD_GRAD_OUTPUT: (t, o, i),
        Role.DGRAD_WEIGHT: (i, o, t),
        Role.WGRAD_GRAD_OUTPUT: (o, t, i),
    }
    cost = LayerCost()
    for role in layer.scheme.corrected.intersection(roles):
        m, n, p = sizes[role]
        k = min(layer.scheme.directions(Role(role ^ 1)), n, p)
        cost += LayerCost(elementwise=1.0 * m * n, corrections=2.0 * m * n * k + 2.0 * m * k * p)
        cost += _quantizers_cost(layer.scheme.resolve(role)[1].quantizer, (m, k))
        if role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT):
            cost += _dense_weight_cost(layer)  # what the error is taken off
    return cost


def _weight_work(layer: MetisLayer, operand: Operand) -> WeightWork:
    """Return `WeightForm.work` of a layer's weight with this operand."""
    shape = (layer.out_features, layer.in_features)
    return layer.weight_form.work(shape, quantized=operand.quantizer is not None)


def _dense_weight_cost(layer: MetisLayer) -> LayerCost:
    """Count what puts an unquantized weight together: (u * s) @ vh + residual, or nothing."""
    return LayerCost(**_weight_work(layer, layer.scheme.fprop_weight).dense)


def _weight_cost(layer: MetisLayer, operand: Operand, *, dim: int = -1) -> LayerCost:
    """Return `WeightForm.quantize`: one quantized copy of the weight [o i], blocks along `dim`."""
    work = _weight_work(layer, operand)
    cost = LayerCost(**work.quantize) + _quantizers_cost(operand.quantizer, *work.quantized)
    if work.operand:
        cost += _operand_cost(operand, (layer.out_features, layer.in_features), dim)
    return cost


def _operand_cost(
    operand: Operand, shape: tuple[int, int], dim: int, *phases: str, quantizes: bool = True
) -> LayerCost:
    """Return operands.Operand on a matrix of this shape: `phases` of `Work`, by default a call."""
    if operand.quantizer is None:
        return LayerCost()
    work = operand.conditioner.work(shape, dim=dim)
    cost = LayerCost()
    for phase in phases or ("call",):
        cost += LayerCost(**getattr(work, phase))
    return cost + _quantizers_cost(operand.quantizer, *work.quantized) if quantizes else cost


def _wgrad_input_cost(scheme: Scheme, tokens: int, width: int) -> LayerCost:
    """Count saving x [t i] and the operand from it; for a shared copy, the operand alone."""
    role, operand = scheme.resolve(Role.WGRAD_INPUT)
    shape = (tokens, width)
    if role is Role.FPROP_INPUT:
        return _operand_cost(operand, shape, -1, "decode", quantizes=False)
    return _operand_cost(operand, shape, 0, "encode", "decode")


def _quantizers_cost(quantizer: Quantizer | None, *shapes: tuple[int, int]) -> LayerCost:
    """Return a quantizer on matrices of these shapes, one call each."""
    cost = LayerCost()
    if quantizer is not None:
        for rows, columns in shapes:
            cost += _quantizer_cost(quantizer, rows, columns)
    return cost


@lru_cache(maxsize=256)
def _quantizer_cost(quantizer: Quantizer, rows: int, columns: int) -> LayerCost:
    """Return what one call computes and moves, counted by running it on the meta device."""
    with use_kernels("reference"):  # others run on no meta device
        quantizer(torch.empty(1, 1, device="meta"), dim=-1, key=Key(0))  # fills the noise's caches
        with _ElementCount() as count:
            quantizer(torch.empty(rows, columns, device="meta"), dim=-1, key=Key(0))
    return LayerCost(quantizers=count.operations, quantizer_bytes=count.bytes)


class _ElementCount(TorchDispatchMode):
    """Counts what kernels compute and move; views cost nothing."""

    operations = 0.0
    bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and "empty" not in str(func):
            read = [x for x in args if isinstance(x, Tensor)]
            # A reduction works on its input, everything else on its output.
            self.operations += max(x.numel() for x in (*read, out))
            self.bytes += sum(x.numel() * x.element_size() for x in (*read, out))
        return out
