"""Multiply-adds and weight bits of a scheme on hardware whose FP4 units run its GEMMs.

Each operand is encoded once and never decoded: the hardware multiplies codes. Emulation computes
more, and spends most of its time on memory traffic.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model, metis_layers
from metis_hf.conversion.report import experts_per_token
from metis_hf.lab.conditioner_cost import ConditionerCost, conditioner_cost
from metis_hf.layers.experts import converted_names, layers_of
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.make import make_layer
from metis_hf.operands import Operand, SplitWeight
from metis_hf.schemes import Role, build_scheme
from metis_hf.schemes.listing import WIDTH
from metis_hf.schemes.roles import contracted_dim, tensor_of

TOKENS = 8192  # default number of tokens per step


@dataclass(frozen=True)
class Overhead:
    """The cost of a scheme beyond the three GEMMs of each layer."""

    parts: Mapping[str, float]  # kind of work -> multiply-adds, as a share of the three GEMMs'
    weight_bits: float  # per element of the weights in fprop, low-rank factors included

    @property
    def share(self) -> float:
        """The sum of all parts, as a share of the three GEMMs' multiply-adds."""
        return sum(self.parts.values())


def overhead(
    layers: Iterable[tuple[tuple[int, int], MetisConfig]],
    tokens: int | Sequence[int] = TOKENS,
    reads: Sequence[Hashable] | None = None,
) -> Overhead:
    """Count the overhead of a training step over layers [t i] @ [i o], 3 t i o multiply-adds each.

    Every distinct operand, weights included, is split, projected or rotated once per step. A
    rotation counts as the dense product with its factors; if the GEMM does not contract the rotated
    dimension, its output is rotated back. A GEMM of FP4 codes multiplies the low-rank part of each
    operand separately, in two thin products; a correction along the same directions adds only one,
    because its coordinates are added to the low-rank part's before the second product. Sparse parts
    are multiplied element by element. The gradients of a split weight's factors count too.

    Args:
        layers: (in_features, out_features) and config of each layer.
        tokens: tokens per step, or one number per layer.
        reads: the name of each layer's input tensor, from `inputs_of`. Layers that read the same
            tensor with equal operands (query, key and value) encode it once. None: each layer
            reads its own tensor.
    """
    flops: dict[str, float] = defaultdict(float)
    gemm = bits = elements = 0.0
    encoded: set[Hashable] = set()
    for number, ((i, o), config) in enumerate(layers):
        t = tokens if isinstance(tokens, int) else tokens[number]
        weight = nn.Parameter(torch.empty(o, i, device="meta"))
        layer = make_layer(weight, None, config, name="layer")
        gemm += 6.0 * t * i * o
        bits += i * o * layer.scheme.weight_bits(o, i)
        elements += i * o
        read = number if reads is None else reads[number]
        encodings = _encodings(layer, t, read, number, encoded)
        for kind, count in chain(encodings, _weight_factors(layer), _products(layer, t)):
            flops[kind] += count
    parts = {kind: count / gemm for kind, count in flops.items() if count}
    return Overhead(parts, bits / elements)


def scheme_overhead(name: str, mode: str | None = None) -> Overhead:
    """Return the overhead of a scheme on a layer of WIDTH x WIDTH, with default settings.

    A scheme that does not have the operand mode `mode` is counted in its own.
    """
    config = MetisConfig(scheme=name, operand_mode=mode)
    try:
        build_scheme(config, WIDTH, WIDTH)
    except ValueError:
        config = config.replace(operand_mode=None)
    return overhead([((WIDTH, WIDTH), config)])


def model_overhead(config: PreTrainedConfig, metis: MetisConfig, tokens: int = TOKENS) -> Overhead:
    """Return the overhead of a scheme on the causal language model of a config, without weights."""
    model = meta_model(config)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    reads = inputs_of(model, linears, torch.zeros(1, 8, dtype=torch.int64, device="meta"))
    get_metis_model(model, metis)
    layers = dict(metis_layers(model))
    shapes = [((x.in_features, x.out_features), x.config) for x in layers.values()]
    each = list(tokens_of_layers(model, tokens).values())
    return overhead(shapes, each, [reads.get(name, name) for name in layers])


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model with fp32 parameters on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)


def tokens_of_layers(model: nn.Module, tokens: int) -> dict[str, int]:
    """Return layer name -> number of a step's tokens that the converted layer sees.

    The router is taken as balanced: each expert sees an equal share of the visits.
    """
    own = getattr(model, "config", None)
    seen: dict[int, int] = {}
    for module in model.modules():
        for key in converted_names(module):
            experts = layers_of(module, key)
            visits = tokens * experts_per_token(getattr(module, "config", own))
            seen |= {id(layer): max(1, visits // len(experts)) for layer in experts}
    return {name: seen.get(id(layer), tokens) for name, layer in metis_layers(model)}


def inputs_of(
    model: nn.Module, layers: Mapping[str, nn.Module], ids: Tensor
) -> dict[str, Hashable]:
    """Run a model on token ids [b length]; return layer name -> name of the layer's input tensor.

    Layers that read the same tensor get equal names; a layer that does not run gets a unique one.
    """
    found: dict[str, Hashable] = {name: name for name in layers}
    held: list[Tensor] = []  # keeps the tensors alive, so that their ids stay unique

    def note(
        name: str, _layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        held.append(x)
        found[name] = id(x)

    handles = [
        layer.register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad():
            model(input_ids=ids)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _cost(operand: Operand, role: Role, layer: MetisLayer, tokens: int) -> ConditionerCost:
    """Return the cost of conditioning the operand at a role."""
    i, o = layer.in_features, layer.out_features
    shapes = {"input": (tokens, i), "weight": (o, i), "grad_output": (tokens, o)}
    return conditioner_cost(operand.conditioner, shapes[tensor_of(role)], contracted_dim(role))


def _encodings(
    layer: MetisLayer, tokens: int, read: Hashable, number: int, encoded: set[Hashable]
) -> Iterator[tuple[str, float]]:
    """Yield (kind, FLOPs) of encoding a layer's operands that are not in `encoded`; add them."""
    for role in Role:
        operand = layer.scheme.operand(role)
        if operand is None or operand.quantizer is None or _is_stored_split(layer, role):
            continue
        kind, dim = tensor_of(role), contracted_dim(role)
        tensor = kind, read if kind == "input" else number  # the layer's own weight or gradient
        cost = _cost(operand, role, layer, tokens)
        made = dict(cost.encode)
        if cost.rotated is not None:  # two operands may share a rotation
            if (tensor, cost.rotated) in encoded:
                made.pop("rotation")
            encoded.add((tensor, cost.rotated))
        if (tensor, operand, dim) not in encoded:
            yield from made.items()
        encoded.add((tensor, operand, dim))


def _weight_factors(layer: MetisLayer) -> Iterator[tuple[str, float]]:
    """Yield the FLOPs of a split weight's stored factors: for its copies, and their gradients."""
    form, scheme = layer.weight_form, layer.scheme
    if not isinstance(form, SplitWeight) or form.side_branch:
        return
    product = 2.0 * layer.out_features * layer.in_features * form.rank
    quantized = scheme.fprop_weight.quantizer is not None
    # A compensated form multiplies both the quantized and the exact factors.
    twice = quantized and form.compensated and not form.exact_factors
    copies = 2 - scheme.reuses(Role.DGRAD_WEIGHT)
    made = 2 * product if twice else 0.0 if quantized else product
    yield "weight_factors", copies * made + 2 * product


def _products(layer: MetisLayer, tokens: int) -> Iterator[tuple[str, float]]:
    """Yield the FLOPs of thin, sparse and correction products, and of rotating outputs back."""
    t, i, o = tokens, layer.in_features, layer.out_features
    form = layer.weight_form
    if isinstance(form, SplitWeight) and form.side_branch:
        yield "thin_products", 3 * 2.0 * t * form.rank * (i + o)
    for left, right, (m, n, p) in (
        (Role.FPROP_INPUT, Role.FPROP_WEIGHT, (t, i, o)),
        (Role.DGRAD_GRAD_OUTPUT, Role.DGRAD_WEIGHT, (t, o, i)),
        (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT, (o, t, i)),
    ):
        # [m n] @ [n p]: (a v) b is computed as a (v b), and a (u w) as (a u) w.
        for role, other, rows, columns in ((left, right, m, p), (right, left, p, m)):
            used, operand = layer.scheme.resolve(role)
            if operand.quantizer is None:
                continue
            rank = layer.scheme.directions(role)
            if not _is_stored_split(layer, role):
                cost = _cost(operand, used, layer, t)
                rank = cost.low_rank
                # The doubled channels of a copy made for another GEMM lie along this output.
                length = rows if used is role else n
                yield "thin_products", 2.0 * cost.channels * columns * length
                yield "sparse_products", 2.0 * cost.sparse * columns
                if cost.rotated is not None and cost.rotated[1] != contracted_dim(role) % 2:
                    yield "rotation", cost.encode["rotation"] * columns / n
            yield "thin_products", 2.0 * rank * (n * columns + m * p)
            if other in layer.scheme.corrected:
                yield "corrections", 2.0 * rank * n * columns


def _is_stored_split(layer: MetisLayer, role: Role) -> bool:
    """Return whether the role's operand is a weight stored as factors and residual."""
    return layer.scheme.multiplies_factors and tensor_of(role) == "weight"
