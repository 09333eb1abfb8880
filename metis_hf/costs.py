"""What one converted layer costs a micro-batch: FLOPs by kind, and what its quantizers move.

Formulas follow the code that they price (`gemm`, `operands`, `weights`, `transforms.spectral`) and
are held to it by tests; what layers that read one tensor share is counted for each of them. A
multiplication with addition counts as 2 FLOPs, so [a b] @ [b c] costs 2abc (Golub & Van Loan,
Matrix Computations, section 1.2). Planning whole runs is in `planning`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from metis_hf.linear import MetisLayer, MetisLinear
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.operands import Hadamard, Identity, Operand, Spectral
from metis_hf.schemes import Role
from metis_hf.transforms.hadamard import SIZE as HADAMARD_SIZE
from metis_hf.transforms.spectral import default_rows


@dataclass(frozen=True)
class LayerCost:
    """Forward and backward pass of one layer, or of several.

    Attributes:
        gemm: the three GEMMs that the dense layer has too.
        subspace: range finder of activations and gradients on the sampled rows, matrix products.
        factorization: its QR and eigenvalue decompositions.
        projection: coordinates of every row in that subspace.
        low_rank: putting the low-rank part together again, and taking the residual.
        weight_factors: the products with u and vh of split weights, forward and backward.
        rotation: Hadamard transforms.
        quantizers: element operations of the quantizers; none of them runs on tensor cores.
        quantizer_bytes: what those read and write in unfused PyTorch, in bytes.
    """

    gemm: float = 0
    subspace: float = 0
    factorization: float = 0
    projection: float = 0
    low_rank: float = 0
    weight_factors: float = 0
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
    """One micro-batch of `tokens` rows through a layer in training mode, forward and backward."""
    return forward_cost(layer, tokens) + backward_cost(layer, tokens)


def forward_cost(layer: MetisLayer, tokens: int) -> LayerCost:
    """fprop, [t i] @ [i o] in 2tio FLOPs, and the making of its operands."""
    scheme, i, o = layer.scheme, layer.in_features, layer.out_features
    cost = LayerCost(gemm=2.0 * tokens * i * o)
    if scheme.is_high_precision:
        return cost + _dense_weight_cost(layer)
    cost += _matrix_cost(scheme.fprop_input, tokens, i)
    return cost + _weight_cost(layer, scheme.fprop_weight)


def backward_cost(layer: MetisLayer, tokens: int) -> LayerCost:
    """dgrad and wgrad, 2tio each, the making of their operands, and the gradients of u, s, vh."""
    scheme, i, o = layer.scheme, layer.in_features, layer.out_features
    cost = LayerCost(gemm=4.0 * tokens * i * o)
    if scheme.is_high_precision:
        return cost + _dense_weight_cost(layer) * 2  # the gradients of both factors
    cost += _matrix_cost(scheme.dgrad_grad_output, tokens, o)
    cost += _weight_cost(layer, scheme.resolve(Role.DGRAD_WEIGHT)[1])  # saved nowhere: made again
    if scheme.wgrad_grad_output is not None:
        cost += _matrix_cost(scheme.wgrad_grad_output, tokens, o)
    if scheme.wgrad_input is not None:
        cost += _matrix_cost(scheme.wgrad_input, tokens, i)  # quantized in forward
    cost += _decoding_cost(scheme.resolve(Role.WGRAD_INPUT)[1], tokens, i)
    if isinstance(layer, MetisLinear):
        # weights.SplitWeight.gradients: dw @ vh^T and u^T @ dw, with u and vh quantized anew
        k = layer.rank
        cost += LayerCost(weight_factors=4.0 * o * i * k)
        cost += _quantizers_cost(scheme.fprop_weight.quantizer, (o, k), (k, i))
    return cost


def _dense_weight_cost(layer: MetisLayer) -> LayerCost:
    """(u * s) @ vh + residual of a split weight that is used unquantized."""
    if not isinstance(layer, MetisLinear):
        return LayerCost()
    return LayerCost(weight_factors=2.0 * layer.out_features * layer.in_features * layer.rank)


def _weight_cost(layer: MetisLayer, operand: Operand) -> LayerCost:
    """weights.*.quantize: one quantized copy of the weight [o i]."""
    i, o = layer.in_features, layer.out_features
    if not isinstance(layer, MetisLinear):
        return _matrix_cost(operand, o, i)
    k = layer.rank
    products = 1  # the low-rank part ...
    if operand.quantizer is not None and layer.weight_form.compensated:
        products = 2  # ... from quantized and from exact factors
    cost = LayerCost(weight_factors=2.0 * products * o * i * k)
    return cost + _quantizers_cost(operand.quantizer, (o, i), (o, k), (k, i))


def _matrix_cost(operand: Operand, rows: int, columns: int) -> LayerCost:
    """operands.Operand on a matrix [rows columns]."""
    if operand.quantizer is None:
        return LayerCost()
    conditioner = operand.conditioner
    if isinstance(conditioner, Spectral):
        return _spectral_cost(conditioner, operand.quantizer, rows, columns)
    cost = _quantizers_cost(operand.quantizer, (rows, columns))
    if isinstance(conditioner, Hadamard):  # one 16 x 16 block product each way
        return cost + LayerCost(rotation=2 * 2.0 * HADAMARD_SIZE * rows * columns)
    if isinstance(conditioner, Identity):
        return cost
    raise TypeError(
        f"no cost formula for the conditioner {type(conditioner).__name__}; add one to "
        "metis_hf.costs before planning a run with it"
    )


def _spectral_cost(split: Spectral, quantizer: Quantizer, t: int, c: int) -> LayerCost:
    """The dynamic split of [t c]: transforms.spectral.dominant_subspace, then the projection.

    n sampled rows, sketch width w, rank k, p power iterations (Halko, Martinsson, Tropp, arXiv
    0909.4061, algorithms 4.4 and 5.1): sketch 2ncw; each iteration 4ncw and a QR; thin 2ncw, its
    Gram 2nw^2, rotation 2cwk. Householder QR of [c w] with Q formed: 4(cw^2 - w^3/3); symmetric
    eigenproblem with vectors: 9w^3 (Golub & Van Loan, sections 5.2 and 8.3). Then all t rows:
    projection 2tck; low-rank part 2tck, twice where the residual is taken against the exact one.
    """
    k = min(split.rank, t, c)
    rows = max(int(split.sample_frac * t + 0.999999), default_rows(k, split.oversample), k)
    n = min(rows, t)
    w = min(k + split.oversample, n, c)
    p = split.n_iter
    products = 1 if split.compensated else 2
    cost = LayerCost(
        subspace=2.0 * n * c * w * (2 + 2 * p) + 2.0 * n * w * w + 2.0 * c * w * k,
        factorization=(p + 1) * 4.0 * (c * w * w - w**3 / 3) + 9.0 * w**3,
        projection=2.0 * t * c * k,
        low_rank=2.0 * products * t * c * k + 2.0 * t * c,  # and one subtraction, one addition
    )
    return cost + _quantizers_cost(quantizer, (t, c), (t, k), (k, c))


def _decoding_cost(operand: Operand, t: int, c: int) -> LayerCost:
    """Putting together again what was saved of x [t c]: its low-rank part. Codes cost little."""
    conditioner = operand.conditioner
    if operand.quantizer is None or not isinstance(conditioner, Spectral):
        return LayerCost()
    return LayerCost(low_rank=2.0 * t * c * min(conditioner.rank, t, c))


def _quantizers_cost(quantizer: Quantizer | None, *shapes: tuple[int, int]) -> LayerCost:
    """A quantizer on matrices of these shapes, one call each."""
    cost = LayerCost()
    if quantizer is not None:
        for rows, columns in shapes:
            cost += _quantizer_cost(quantizer, rows, columns)
    return cost


@lru_cache(maxsize=256)
def _quantizer_cost(quantizer: Quantizer, rows: int, columns: int) -> LayerCost:
    """What one call computes and moves, counted by running it on the meta device."""
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
