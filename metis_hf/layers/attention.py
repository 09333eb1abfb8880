"""The two products of attention with quantized operands: scores = Q K^T, and probabilities x V.

Each product is a linear layer whose weight is an activation, y = a @ b.T with (a, b) = (Q, K) or
(P, V^T). It takes the operands of a scheme as a linear layer does: a as x, b as w.

    fprop   y  = a_hat @ b_hat.T       scores along head_dim, context along keys
    dgrad   da = dy_hat @ b_hat        dQ along keys, dP along head_dim
    wgrad   db = dy_hat.T @ a_hat      dK and dV along queries, the heads of a group together

Each GEMM quantizes its own copies, in blocks along its contraction dimension, before keys and
values are repeated for the heads of a group. One fp32 tensor scale covers all heads and sequences
of a call. Scaling, softcap, mask and softmax run in fp32 with exact gradients; quantizers are
straight-through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metis_hf.config import MetisConfig
from metis_hf.layers.call_input import gemm_dtype
from metis_hf.layers.gemm import scaled_product
from metis_hf.layers.unsupported import (
    differentiable_once,
    refuse_batched_gradients,
    refuse_unsupported,
)
from metis_hf.noise import key_of
from metis_hf.numerics import Tile
from metis_hf.operands import (
    FullHadamard,
    Hadamard,
    Identity,
    Operand,
    Quantized,
    RandomHadamard,
    RandomKronecker,
    Requantized,
)
from metis_hf.operands.conditioner import as_fp32
from metis_hf.operands.conditioners.requantized import first_copy
from metis_hf.operands.weight_forms import DenseWeight
from metis_hf.schemes import Role, Scheme, build_scheme
from metis_hf.schemes.noise_keys import CallKeys, process_rank

_ROTATIONS = (Hadamard, FullHadamard, RandomHadamard, RandomKronecker)
_INSTEAD = (
    'Choose a scheme that quantizes plain blocks, such as attention="nvfp4-rne" or "nvidia", or '
    "None"
)


def build_attention_scheme(config: MetisConfig) -> Scheme:
    """Return the scheme of both products: operands of `config.attention`, one copy per GEMM.

    Raises:
        ValueError: the scheme does not exist, or cannot quantize products of two activations.
    """
    # Any size will do: it sets ranks, and schemes that split are refused.
    scheme = build_scheme(config.for_attention(), 64, 64)
    reason = _why_not(scheme)
    if reason is not None:
        raise ValueError(
            f"attention={config.attention!r} cannot be the scheme of attention products, because "
            f"it {reason}. {_INSTEAD}"
        )
    return _in_own_blocks(scheme)


def _why_not(scheme: Scheme) -> str | None:
    """Return why a scheme cannot quantize queries, keys and values; None if it can."""
    if scheme.corrected or scheme.splits:
        return "splits tensors or stores split weights, which requires a layer with a weight"
    if type(scheme.weight) is not DenseWeight:
        return "trains factors in addition to a weight, and keys and values are not weights"
    if scheme.state is not None and scheme.state.initial(16, 16):
        kind = type(scheme.state).__name__
        return f"keeps state ({kind}) of a layer's weight or inputs, which attention does not have"
    for role in Role:
        operand = scheme.resolve(role)[1]
        if operand.quantizer is None:
            continue
        conditioner = operand.conditioner
        if isinstance(conditioner, Requantized):
            conditioner = conditioner.second
        if type(conditioner) is Identity:
            continue
        if not isinstance(conditioner, _ROTATIONS):
            kind = type(conditioner).__name__
            return f"has a conditioner ({kind}) that is neither direct quantization nor a rotation"
        if role in (Role.FPROP_INPUT, Role.FPROP_WEIGHT):
            return (
                "rotates operands in the forward pass: rotated along the keys, rounding would "
                "give weight to later tokens, whose probabilities the mask has set to zero"
            )
    return None


def _in_own_blocks(scheme: Scheme) -> Scheme:
    """Replace square tiles by row blocks, which run along the contraction of each GEMM."""
    changes: dict[str, Operand] = {}
    for role in Role:
        operand = scheme.resolve(role)[1]
        if operand.quantizer is not None and operand.quantizer.tile is Tile.SQUARE:
            quantizer = replace(operand.quantizer, tile=Tile.ROW)
            changes[role.name.lower()] = replace(operand, quantizer=quantizer)
    return replace(scheme, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ProductOperands:
    """The plan of one product in one call.

    Attributes:
        state: the scheme's state as frozen for this call.
    """

    scheme: Scheme
    dtype: torch.dtype  # of the GEMMs and the output
    keys: CallKeys
    state: Any = None

    def operand(self, role: Role, x: Tensor) -> Quantized:
        """Quantize a [.. m c], b [.. n c] or dy [.. m n] for the GEMM that `role` names.

        Returns:
            Values in the same layout, possibly padded along the contraction dimension.
        """
        role, operand = self.scheme.resolve(role)
        if self.state is not None:
            operand = operand.bind(self.state)
        by_rows = role in (Role.DGRAD_WEIGHT, Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT)
        again = operand.conditioner
        if by_rows and isinstance(again, Requantized):  # its first copy is fprop's
            assert operand.quantizer is not None
            x = first_copy(x.reshape(-1, x.shape[-1]), operand.quantizer).view(x.shape)
            operand = replace(operand, conditioner=again.second)
        x = x.mT if by_rows else x
        found = operand(x.reshape(-1, x.shape[-1]), dim=-1, key=self.keys[role], dtype=self.dtype)
        values = found.values.view(*x.shape[:-1], found.values.shape[-1])
        return Quantized(values.mT if by_rows else values, found.scale)


class QuantizedProduct(torch.autograd.Function):
    """y [b g m n] = a_hat [b g m c] @ b_hat [b n c].T: g heads with the same keys or values."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, plan: ProductOperands) -> Tensor:
        with torch.autocast(a.device.type, enabled=False):
            a_hat = _merged(plan.operand(Role.FPROP_INPUT, a))
            y = scaled_product(a_hat, plan.operand(Role.FPROP_WEIGHT, b).transposed())
        ctx.save_for_backward(a, b)
        ctx.plan = plan
        return y.view(*a.shape[:-1], b.shape[-2])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # dy [b g m n]
        refuse_batched_gradients(dy)
        plan: ProductOperands = ctx.plan
        a, b = ctx.saved_tensors
        need_a, need_b, _ = ctx.needs_input_grad
        da = db = None
        with torch.autocast(dy.device.type, enabled=False):
            if need_a:
                d_hat = _merged(plan.operand(Role.DGRAD_GRAD_OUTPUT, dy))
                da = scaled_product(d_hat, plan.operand(Role.DGRAD_WEIGHT, b))
                da = da[..., : a.shape[-1]].reshape(a.shape).to(a.dtype)
            if need_b:
                d_hat = plan.operand(Role.WGRAD_GRAD_OUTPUT, dy)
                a_hat = plan.operand(Role.WGRAD_INPUT, a)
                rows = max(d_hat.values.shape[-2], a_hat.values.shape[-2])
                d_hat, a_hat = _merged(d_hat, rows), _merged(a_hat, rows)
                db = scaled_product(d_hat.transposed(), a_hat)
                db = db[..., : b.shape[-2], : b.shape[-1]].to(b.dtype)
        return da, db, None


def _merged(x: Quantized, rows: int = 0) -> Quantized:
    """Concatenate the rows of a group's heads, [b g m n] -> [b g*m n], each padded to `rows`."""
    missing = max(rows - x.values.shape[-2], 0)
    values = F.pad(x.values, (0, 0, 0, missing)) if missing else x.values
    return Quantized(values.flatten(1, 2), x.scale)


class AttentionProducts(nn.Module):
    """Computes the two products of an attention module by a scheme; it has no parameters.

    Attributes:
        scheme: of both products in training.
        eval_scheme: the same with nearest rounding everywhere.
        plain_config: the original config of the attention module, which selects the implementation
            that runs where nothing is quantized.
    """

    def __init__(self, config: MetisConfig, name: str, plain_config: Any = None) -> None:
        super().__init__()
        self.name = name
        self.plain_config = plain_config
        self.set_config(config)

    def set_config(self, config: MetisConfig) -> None:
        """Switch to another config; raises as `build_attention_scheme`."""
        scheme = build_attention_scheme(config)
        self.config, self.scheme = config, scheme
        self.eval_scheme = scheme.deterministic()
        # Made here because torch.compile cannot trace `key_of`.
        self.keys = {
            kind: key_of("attention", config.seed, self.name, kind)
            for kind in ("scores", "context")
        }

    def active_scheme(self) -> Scheme:
        """Return the scheme of the current mode: eval rounds to nearest everywhere."""
        return self.scheme if self.training else self.eval_scheme

    def product(self, a: Tensor, b: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
        """Return a [b g m c] @ b [b n c].T with quantized operands, [b g m n] in `dtype`.

        Args:
            a: queries or probabilities, heads in groups.
            b: keys, or values transposed.
            kind: "scores" or "context"; each has its own noise.
            dtype: of the GEMMs.
        """
        refuse_unsupported(self.name, a, (b,))
        scheme = self.active_scheme()
        rank = process_rank()
        keys = CallKeys(self.keys[kind].fold(rank), a, b, rank=rank)
        state = None
        if scheme.state is not None:
            rows, columns = (x.detach().reshape(-1, x.shape[-1]) for x in (a, b))
            state = scheme.state.freeze({}, rows, columns, keys)
        return QuantizedProduct.apply(a, b, ProductOperands(scheme, dtype, keys, state))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        blocked: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention.

        Args:
            query: [b h q d]
            key: [b h' k d]; h' divides h.
            value: [b h' k e]
            scaling: factor of the scores.
            blocked: bool, broadcastable to [b h q k]; True masks a key. Masked probabilities are
                exactly zero, also in rows whose keys are all masked.
            bias: added to the scores; broadcastable to [b h q k].
            softcap: scores become softcap * tanh(scores / softcap), before the bias.
            sinks: [h], logits that take a share of the probabilities but have no value.

        Returns:
            (output [b h q e], probabilities [b h q k] fp32 before quantization).
        """
        dtype = gemm_dtype(query)
        batch, heads, queries, width = query.shape
        groups, keys = key.shape[1:3]
        in_groups = (batch * groups, heads // groups, queries)
        with torch.autocast(query.device.type, enabled=False):
            grouped = query.reshape(*in_groups, width)
            scores = self.product(grouped, key.flatten(0, 1), "scores", dtype)
            scores = as_fp32(scores).view(batch, heads, queries, keys) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if bias is not None:
                scores = scores + bias
            probabilities = _softmax(scores, blocked, sinks)
            grouped = probabilities.view(*in_groups, keys)
            context = self.product(grouped, value.flatten(0, 1).mT, "context", dtype)
        return context.view(batch, heads, queries, value.shape[-1]), probabilities

    def extra_repr(self) -> str:
        return f"attention={self.config.attention}"


def _softmax(scores: Tensor, blocked: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return probabilities [b h q k] of scores in fp32, zero where `blocked`."""
    if blocked is not None:
        scores = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)
    if sinks is None:
        probabilities = scores.softmax(-1)
    else:
        logits = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        probabilities = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
    return probabilities if blocked is None else probabilities.masked_fill(blocked, 0.0)
