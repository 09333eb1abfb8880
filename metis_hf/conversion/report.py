"""What get_metis_model did to a model: layers, coverage, and what stayed out and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from metis_hf.layers.experts import expert_shape, fused_weights, is_fused_experts

# What configs of transformers call it.
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
)


@dataclass(frozen=True)
class LayerReport:
    """One converted layer."""

    name: str
    in_features: int
    out_features: int
    scheme: str
    rank: int | None  # of the weight's split, stored or made anew at each use; None: no split
    bits_per_weight: float  # operand bits of the GEMM weight, low-rank part included
    error: float  # max |represented - original| / max |original|; 0 for one stored matrix

    @property
    def params(self) -> int:
        """Weights of the original layer."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class ConversionReport:
    """What get_metis_model did; `print` it.

    Attributes:
        scheme: name of the scheme.
        layers: the converted ones; one for each expert of a fused layer.
        skipped: linear layers that stay in high precision, with the reason.
        total_params: parameters of the model before conversion.
        flops_share: share of the multiplications with weights (linear layers, experts and output
            head; attention scores not counted) that a token spends in converted layers.
    """

    scheme: str
    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    total_params: int
    flops_share: float

    @property
    def converted_params(self) -> int:
        """Weights, of the original model, whose GEMMs are quantized."""
        return sum(layer.params for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """Mean over converted weights."""
        bits = sum(layer.bits_per_weight * layer.params for layer in self.layers)
        return bits / self.converted_params

    def __str__(self) -> str:
        share = self.converted_params / max(self.total_params, 1)
        lines = [
            f"scheme {self.scheme}: {len(self.layers)} layers converted || "
            f"{self.converted_params:,} of {self.total_params:,} params ({share:.1%}), "
            f"{self.flops_share:.1%} of GEMM FLOPs || {self.bits_per_weight:.2f} bits per weight"
        ]
        others = Counter(layer.scheme for layer in self.layers if layer.scheme != self.scheme)
        for scheme, count in others.items():
            lines.append(f"  scheme {scheme} instead in {count} layers (scheme_pattern)")
        ranks = Counter(layer.rank for layer in self.layers if layer.rank is not None)
        if ranks:
            text = ", ".join(f"{rank} ({count} layers)" for rank, count in sorted(ranks.items()))
            error = max(layer.error for layer in self.layers)
            stored = f"; split reproduces the weights to {error:.1e}" if error else ""
            lines.append(f"  rank {text}{stored}")
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            shown = ", ".join(names[:4]) + (f", ... ({len(names)})" if len(names) > 4 else "")
            lines.append(f"  kept in high precision ({reason}): {shown}")
        return "\n".join(lines)


def gemm_weights(model: nn.Module) -> dict[str, float]:
    """Multiplications with weights that one token costs, by module name (experts: by weight).

    An expert layer counts the experts that a token visits. Modules run once; a module that is not
    used for every token (a decoder beside an encoder) counts as if it were.
    """
    cost: dict[str, float] = {}
    config = getattr(model, "config", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            cost[name] = float(module.weight.numel())
        elif is_fused_experts(module):
            visited = _experts_per_token(getattr(module, "config", config))
            for key in fused_weights(module):
                in_features, out_features = expert_shape(module, key)
                cost[f"{name}.{key}".removeprefix(".")] = visited * in_features * out_features
    return cost


def _experts_per_token(config: object) -> int:
    for name in (
        "num_experts_per_tok",
        "moe_topk",
        "moe_k",
        "top_k_experts",
        "num_experts_per_token",
    ):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 1
