"""The report of a conversion: converted layers, coverage, and skipped layers with reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from metis_hf.conversion.candidates import is_of_experts, unknown_matrices
from metis_hf.conversion.linears import is_linear
from metis_hf.layers.experts import expert_shape, fused_weights, is_fused_experts
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.native import why_emulated
from metis_hf.shared.messages import some


@dataclass(frozen=True)
class LayerReport:
    """One converted layer.

    Attributes:
        name: full name in the model; experts end with their index.
        kind: class of the original layer ("Linear", "Conv1D", "FalconLinear"), or "expert".
        in_features: columns of the weight.
        out_features: rows of the weight.
        scheme: name of the scheme.
        rank: directions of the weight's split, stored or computed at each use; None: no split.
        bits_per_weight: operand bits of the GEMM weight, low-rank part included.
        error: max |represented - original| / max |original| at conversion; 0 if the weight is
            stored as one matrix.
        native: whether FP4 units compute its GEMMs.
        emulated: why `backend="auto"` emulates the layer; None: the layer is native, runs in high
            precision, or has `backend="emulated"`.
    """

    name: str
    kind: str
    in_features: int
    out_features: int
    scheme: str
    rank: int | None
    bits_per_weight: float
    error: float
    native: bool = False
    emulated: str | None = None

    @property
    def params(self) -> int:
        """Number of weights in the original layer."""
        return self.in_features * self.out_features

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and `params`, ready for JSON."""
        return {**asdict(self), "params": self.params}


def precision_fields(layer: MetisLayer) -> dict[str, Any]:
    """Return the fields of a layer's `LayerReport` that follow from its current config."""
    scheme, config = layer.scheme, layer.config
    emulated = why_emulated(config, scheme, layer.weight_params()[-1].device)
    asks = config.backend != "emulated" and not scheme.is_high_precision
    return {
        "scheme": config.scheme,
        "rank": scheme.rank if scheme.splits else None,
        "bits_per_weight": scheme.weight_bits(layer.out_features, layer.in_features),
        "native": asks and emulated is None,
        "emulated": emulated,
    }


@dataclass(frozen=True)
class ConversionReport:
    """The result of get_metis_model; `print` it, or use `to_dict` in programs.

    Attributes:
        scheme: name of the scheme.
        layers: the converted layers; one for each expert of a fused layer.
        skipped: linear layers, and matrices of other modules, that stay in high precision, with the
            reason.
        total_params: parameters of the model before conversion; tied parameters count once.
        flops_share: share of a token's multiplications with weights (linear layers, experts and
            output head, without attention scores) that is in converted layers. The parameters in
            `uncounted` are in neither numerator nor denominator.
        attention: the scheme of the attention products; None: they are not converted.
        attention_modules: names of the attention modules with converted products.
        uncounted: names of skipped parameters whose use per token is unknown.
    """

    scheme: str
    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    total_params: int
    flops_share: float
    attention: str | None = None
    attention_modules: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def converted_params(self) -> int:
        """Number of the original model's weights whose GEMMs are quantized."""
        return sum(layer.params for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """Mean `LayerReport.bits_per_weight` over converted weights."""
        bits = sum(layer.bits_per_weight * layer.params for layer in self.layers)
        return bits / self.converted_params

    @property
    def ranks(self) -> dict[int, int]:
        """Number of layers by rank, ascending; layers without a split are left out."""
        counts = Counter(layer.rank for layer in self.layers if layer.rank is not None)
        return dict(sorted(counts.items()))

    @property
    def other_schemes(self) -> dict[str, int]:
        """Number of layers by scheme, for schemes other than the model's."""
        return dict(Counter(x.scheme for x in self.layers if x.scheme != self.scheme))

    @property
    def emulated(self) -> dict[str, int]:
        """Number of layers by the reason why `backend="auto"` emulates them."""
        return dict(Counter(layer.emulated for layer in self.layers if layer.emulated))

    @property
    def max_error(self) -> float:
        """The largest `LayerReport.error`."""
        return max((layer.error for layer in self.layers), default=0.0)

    def skipped_by_reason(self) -> dict[str, list[str]]:
        """Return the names of the skipped layers by reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        return by_reason

    def to_dict(self) -> dict[str, Any]:
        """Return layers, skipped layers and totals, ready for JSON."""
        attention = {"scheme": self.attention, "modules": list(self.attention_modules)}
        return {
            "scheme": self.scheme,
            **({} if self.attention is None else {"attention": attention}),
            "converted_params": self.converted_params,
            "total_params": self.total_params,
            "flops_share": self.flops_share,
            **({"uncounted": list(self.uncounted)} if self.uncounted else {}),
            "bits_per_weight": self.bits_per_weight,
            "max_error": self.max_error,
            "layers": [layer.to_dict() for layer in self.layers],
            "skipped": [{"name": name, "reason": why} for name, why in self.skipped.items()],
        }

    def text(self, *, error: bool = True) -> str:
        """Return the report in a few lines.

        Args:
            error: include the reconstruction error of the split, which holds only at conversion.
        """
        share = self.converted_params / max(self.total_params, 1)
        without = f" (excluding {len(self.uncounted)} unknown parameters)" if self.uncounted else ""
        lines = [
            f"scheme {self.scheme}: {len(self.layers)} layers converted || "
            f"{self.converted_params:,} of {self.total_params:,} params ({share:.1%}), "
            f"{self.flops_share:.1%} of GEMM FLOPs{without} || "
            f"{self.bits_per_weight:.2f} bits per weight"
        ]
        for scheme, count in self.other_schemes.items():
            lines.append(f"  scheme {scheme} in {count} layers (scheme_pattern)")
        if self.ranks:
            ranks = ", ".join(f"{rank} ({count} layers)" for rank, count in self.ranks.items())
            stored = error and self.max_error > 0
            exact = f"; split reproduces the weights to {self.max_error:.1e}" if stored else ""
            lines.append(f"  rank {ranks}{exact}")
        if self.attention is not None:
            count = len(self.attention_modules)
            lines.append(f"  attention products: {self.attention} in {count} modules")
        native = sum(layer.native for layer in self.layers)
        if native:
            lines.append(f"  GEMMs on FP4 units: {native} layers")
            if self.attention is not None:
                lines.append("  attention products emulated: FP4 units run only linear layers")
        for reason, count in self.emulated.items():
            lines.append(f"  GEMMs emulated in {count} layers: {reason}")
        for reason, names in self.skipped_by_reason().items():
            lines.append(f"  kept in high precision ({reason}): {some(names)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def count_params(model: nn.Module) -> int:
    """Return the number of parameters; tied parameters count once.

    On the meta device tied parameters stay separate until weights are loaded, so transformers' list
    of tied names is used.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names: set[str] = set()
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        source = tied.get(name, name)
        if source not in names:
            params[id(param)] = param
        names.add(source)
    return sum(param.numel() for param in params.values())


def gemm_weights(model: nn.Module) -> dict[str, float]:
    """Return the number of multiplications per token, by module name (experts: by weight name).

    Fused experts count for the number of experts that a token visits. Experts unknown to
    transformers' interface count in the same way if all matrices of the module are 3-D and their
    first dimension is its `num_experts`. Matrices of other modules count once; other parameters do
    not count. Every module is assumed to run once per token, even a decoder next to an encoder.
    """
    cost: dict[str, float] = {}
    config = getattr(model, "config", None)
    for name, module in model.named_modules():
        if is_linear(module):
            # Not the weight's shape: another library may store the weight in another shape or name.
            linear = isinstance(module, nn.Linear)
            sizes = (module.in_features, module.out_features) if linear else (module.nx, module.nf)
            cost[name] = float(sizes[0] * sizes[1])
        elif is_fused_experts(module):
            visited = experts_per_token(getattr(module, "config", config))
            for key in fused_weights(module):
                in_features, out_features = expert_shape(module, key)
                cost[f"{name}.{key}".removeprefix(".")] = visited * in_features * out_features
        else:
            matrices = dict(unknown_matrices(model, name, module))
            count = getattr(module, "num_experts", None)
            # All must match: LongCat's do not, since some of its experts compute nothing.
            known = all(param.dim() == 3 and len(param) == count for param in matrices.values())
            for key, param in matrices.items():
                if known:
                    visited = experts_per_token(_config_around(model, name))
                    cost[f"{name}.{key}".removeprefix(".")] = visited * param[0].numel()
                elif param.dim() == 2 and not is_of_experts(module):
                    cost[f"{name}.{key}".removeprefix(".")] = float(param.numel())
    return cost


def _config_around(model: nn.Module, name: str) -> object:
    """Return the config of a module, or of its innermost ancestor with one."""
    config = getattr(model.get_submodule(name), "config", None)
    if config is None and name:
        return _config_around(model, name.rpartition(".")[0])
    return config


def experts_per_token(config: object) -> int:
    """Return the number of experts that a token visits in a layer; 1 if the config has none.

    If the config has one number per layer, return the rounded mean.
    """
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
        if isinstance(value, list | tuple) and value:  # one per layer
            return round(sum(value) / len(value))
    return 1
