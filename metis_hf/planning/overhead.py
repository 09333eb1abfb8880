"""Overhead of a scheme where FP4 units run its GEMMs: multiply-adds beyond them, weight bits.

`costs` counts what emulation computes. Here each operand is made once, from the matrix to its
codes, and nothing is put together again: hardware multiplies codes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model, metis_layers
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.make import make_layer
from metis_hf.operands import Operand
from metis_hf.planning.plan import meta_model
from metis_hf.schemes import Role, Scheme, build_scheme
from metis_hf.schemes.listing import WIDTH

TOKENS = 8192  # of a step, unless the caller says otherwise
_PRODUCTS = ("subspace", "factorization", "projection", "low_rank", "rotation")

Shape = tuple[int, int]  # in_features, out_features


@dataclass(frozen=True)
class Overhead:
    """Costs of a scheme beyond the three GEMMs of some layers.

    Attributes:
        parts: kind of work ("projection", "corrections", ...) -> multiply-adds over those of the
            three GEMMs; kinds without any are left out.
        weight_bits: stored for each element of the weights in fprop, low-rank factors included.
    """

    parts: Mapping[str, float]
    weight_bits: float

    @property
    def share(self) -> float:
        """All parts together, over the multiply-adds of the three GEMMs."""
        return sum(self.parts.values())


def overhead(
    layers: Iterable[tuple[Shape, MetisConfig]],
    tokens: int = TOKENS,
    reads: Sequence[Hashable] | None = None,
) -> Overhead:
    """Count a step of `tokens` tokens through layers, each [t i] @ [i o] in 3 t i o multiply-adds.

    Every distinct operand is split, projected or rotated once a step, the weight too. A rotation
    counts as the dense product with its factors. A GEMM of FP4 codes multiplies the low-rank parts
    of its operands apart, by two thin products each; a correction in their directions adds one, as
    its coordinates are summed with those of the low-rank part before the second.

    Args:
        layers: (in_features, out_features) and config of each layer.
        tokens: that the step's weights are shared by.
        reads: for each layer, a name of the tensor that it reads, as `inputs_of` finds it. Layers
            that read one tensor with equal operands (query, key and value) split it once. None: a
            tensor each.
    """
    flops: dict[str, float] = {}
    gemm = bits = elements = 0.0
    encoded: set[tuple[Hashable, Operand | None, int]] = set()
    for number, ((i, o), config) in enumerate(layers):
        weight = nn.Parameter(torch.empty(o, i, device="meta"))
        layer = make_layer(weight, None, config, name="layer")
        scheme = layer.scheme
        gemm += 6.0 * tokens * i * o
        bits += i * o * scheme.weight_bits(o, i)
        elements += i * o
        for role, shape, dim in _places(tokens, i, o):
            if reads is not None and role in (Role.FPROP_INPUT, Role.WGRAD_INPUT):
                key = reads[number], scheme.operand(role), dim
                if key in encoded:
                    continue
                encoded.add(key)
            for kind, count in _encoding(scheme, role, shape, dim).items():
                flops[kind] = flops.get(kind, 0.0) + count
        factors = layer.weight_form.work((o, i), quantized=True)
        stored = {k: v for k, v in factors.quantize.items() if k == "weight_factors"}
        for kind, count in {**_thin_products(layer, tokens), **stored}.items():
            flops[kind] = flops.get(kind, 0.0) + count
    parts = {kind: count / gemm for kind, count in flops.items() if count}
    return Overhead(parts, bits / elements)


def scheme_overhead(name: str, mode: str | None = None, tokens: int = TOKENS) -> Overhead:
    """Count a scheme on a layer of `WIDTH` inputs and outputs, with defaults for all else.

    Args:
        name: of a registered scheme.
        mode: `MetisConfig.operand_mode`; a scheme without that mode is counted in its own.
        tokens: of a step.
    """
    config = MetisConfig(scheme=name, operand_mode=mode)
    try:
        build_scheme(config, WIDTH, WIDTH)
    except ValueError:
        config = config.replace(operand_mode=None)
    return overhead([((WIDTH, WIDTH), config)], tokens)


def model_overhead(config: PreTrainedConfig, metis: MetisConfig, tokens: int = TOKENS) -> Overhead:
    """Count a scheme on a causal language model of a transformers config; nothing is allocated.

    Args:
        config: of the model before it is converted.
        metis: how it is converted.
        tokens: of a step.

    Raises:
        ValueError: nothing of the model is converted.
    """
    model = meta_model(config)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    reads = inputs_of(model, linears, torch.zeros(1, 8, dtype=torch.int64, device="meta"))
    get_metis_model(model, metis)
    layers = dict(metis_layers(model))
    shapes = [((x.in_features, x.out_features), x.config) for x in layers.values()]
    return overhead(shapes, tokens, [reads.get(name, name) for name in layers])


def inputs_of(
    model: nn.Module, layers: Mapping[str, nn.Module], ids: Tensor
) -> dict[str, Hashable]:
    """Run a model on token ids [b length], and name the tensor that each layer reads.

    Returns:
        Equal values for layers that read the same tensor; a layer that does not run has one of its
        own.
    """
    found: dict[str, Hashable] = {name: name for name in layers}
    held: list[Tensor] = []  # so that no two tensors have one identity

    def note(name: str):
        def hook(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            held.append(inputs[0])
            found[name] = id(inputs[0])

        return hook

    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            model(input_ids=ids)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _places(t: int, i: int, o: int) -> tuple[tuple[Role, Shape, int], ...]:
    """Return the six operands with their matrices and the dimensions that GEMMs contract."""
    return (
        (Role.FPROP_INPUT, (t, i), -1),
        (Role.FPROP_WEIGHT, (o, i), -1),
        (Role.DGRAD_GRAD_OUTPUT, (t, o), -1),
        (Role.DGRAD_WEIGHT, (o, i), 0),
        (Role.WGRAD_GRAD_OUTPUT, (t, o), 0),
        (Role.WGRAD_INPUT, (t, i), 0),
    )


def _thin_products(layer: MetisLayer, tokens: int) -> dict[str, float]:
    """Return the FLOPs of low-rank parts and doubled channels, and of corrections, of all GEMMs."""
    t, i, o = tokens, layer.in_features, layer.out_features
    places = {role: (shape, dim) for role, shape, dim in _places(t, i, o)}
    total = {"corrections": 0.0, "thin_products": 0.0}
    for left, right, (m, n, p) in (
        (Role.FPROP_INPUT, Role.FPROP_WEIGHT, (t, i, o)),
        (Role.DGRAD_GRAD_OUTPUT, Role.DGRAD_WEIGHT, (t, o, i)),
        (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT, (o, t, i)),
    ):
        # [m n] @ [n p]: (a v) b by way of v b; a (u w) by way of a u.
        for role, other, inner in ((left, right, n * p), (right, left, m * n)):
            rank, channels = _apart(layer, role, places)
            total["thin_products"] += 2.0 * rank * (inner + m * p) + 2.0 * channels * m * p
            if other in layer.scheme.corrected:
                total["corrections"] += 2.0 * rank * inner
    return total


def _apart(
    layer: MetisLayer, role: Role, places: Mapping[Role, tuple[Shape, int]]
) -> tuple[int, int]:
    """Return the rank of an operand's low-rank part, and how many channels it doubles."""
    role, operand = layer.scheme.resolve(role)
    if operand.quantizer is None:
        return 0, 0
    if layer.weight_form.is_split and role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT):
        return layer.weight_form.rank or 0, 0
    shape, dim = places[role]
    work = operand.conditioner.work(shape, dim=dim)
    return work.low_rank, work.channels


def _encoding(scheme: Scheme, role: Role, shape: Shape, dim: int) -> dict[str, float]:
    """Return the FLOPs that make an operand's codes; none for a copy of another's."""
    operand = scheme.operand(role)
    if operand is None or operand.quantizer is None:
        return {}
    if scheme.weight.is_split and role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT):
        return {}
    work = operand.conditioner.work(shape, dim=dim)
    return {kind: count for kind, count in work.encode.items() if kind in _PRODUCTS}
