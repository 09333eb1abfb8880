"""get_metis_model: converts any transformers model in place, and says what it did; to_dense back.

First everything is checked, then the layers are swapped one by one, so an error leaves the model
as it was. Loading checkpoints is in `hub`, choosing modules in `matching`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig
from metis_hf.linear import (
    MetisLayer,
    MetisLinear,
    as_linear,
    convert_linear,
    linear_shape,
)
from metis_hf.matching import select_modules
from metis_hf.numerics import NVFP4
from metis_hf.schemes import build_scheme, kept_directions, layer_rank
from metis_hf.token_mask import TokenMask


@dataclass(frozen=True)
class LayerReport:
    """One converted layer."""

    name: str
    in_features: int
    out_features: int
    rank: int | None  # None: dense weight
    bits_per_weight: float  # operand bits of the GEMM weight, low-rank part included
    error: float  # max |represented - original| / max |original|


@dataclass(frozen=True)
class ConversionReport:
    """What get_metis_model did; `print` it.

    Attributes:
        scheme: name of the scheme.
        layers: the converted ones.
        skipped: linear layers that stay in high precision, with the reason.
        total_params: parameters of the model before conversion.
    """

    scheme: str
    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    total_params: int

    @property
    def converted_params(self) -> int:
        """Weights, of the original model, whose GEMMs are quantized."""
        return sum(layer.in_features * layer.out_features for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """Mean over converted weights."""
        bits = (x.bits_per_weight * x.in_features * x.out_features for x in self.layers)
        return sum(bits) / self.converted_params

    def __str__(self) -> str:
        share = self.converted_params / max(self.total_params, 1)
        ranks = Counter(layer.rank for layer in self.layers if layer.rank is not None)
        lines = [
            f"scheme {self.scheme}: {len(self.layers)} layers converted || "
            f"{self.converted_params:,} of {self.total_params:,} params ({share:.1%}) || "
            f"{self.bits_per_weight:.2f} bits per weight"
        ]
        if ranks:
            text = ", ".join(f"{rank} ({count} layers)" for rank, count in sorted(ranks.items()))
            error = max(layer.error for layer in self.layers)
            lines.append(f"  rank {text}; split reproduces the weights to {error:.1e}")
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            shown = ", ".join(names[:4]) + (f", ... ({len(names)})" if len(names) > 4 else "")
            lines.append(f"  kept in high precision ({reason}): {shown}")
        return "\n".join(lines)


def metis_layers(model: nn.Module) -> Iterator[tuple[str, MetisLayer]]:
    """(name, layer) of every converted layer."""
    for name, module in model.named_modules():
        if isinstance(module, MetisLayer):
            yield name, module


def get_metis_model(model: nn.Module, config: MetisConfig | None = None) -> nn.Module:
    """Replaces the target linear layers of `model`, in place, by quantized ones.

    Call it before the optimizer, `Trainer`, DDP or FSDP sees the model: a split weight is stored in
    new parameters. The report is in `model.metis_report`.

    Args:
        model: any transformers model, or any module with nn.Linear or Conv1D layers.
        config: default `MetisConfig()`.

    Returns:
        The same model.

    Raises:
        ValueError: unknown scheme, no layer selected, a rank above half of a layer's directions,
            a tied weight named as target, non-finite weights, a model that is converted already.
            The model is then unchanged.
    """
    config = config or MetisConfig()
    existing = next(metis_layers(model), None)
    if existing is not None:
        raise ValueError(
            f"the model is converted already ({existing[0]} runs scheme "
            f"{existing[1].config.scheme!r}); call to_dense(model) first"
        )
    selection = select_modules(model, config)
    modules = {name: as_linear(model.get_submodule(name)) for name in selection.names}
    for name, module in modules.items():
        _check_layer(name, module, config)

    total = sum(p.numel() for p in model.parameters())
    token_mask = TokenMask()
    layers, reports = {}, []
    for name, module in modules.items():
        try:
            layers[name] = convert_linear(module, config, name=name, token_mask=token_mask)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        reports.append(_report(name, module, layers[name]))
    for name, layer in layers.items():
        model.set_submodule(name, layer)

    report = ConversionReport(config.scheme, tuple(reports), selection.skipped, total)
    model.metis_report = report  # type: ignore[assignment]
    token_mask.register(model)
    if isinstance(model, PreTrainedModel):
        model.config.quantization_config = config
        model.add_model_tags(["metis", "fp4-training"])
    return model


def to_dense(model: nn.Module) -> nn.Module:
    """Turns every converted layer back into a plain one with the weight it represents, in place.

    Returns:
        The same model, a plain transformers model again; its checkpoints need no metis_hf.

    Raises:
        ValueError: the model has no converted layer.
    """
    layers = dict(metis_layers(model))
    if not layers:
        raise ValueError("the model has no Metis layer; nothing to turn back")
    for name, layer in layers.items():
        model.set_submodule(name, layer.to_dense())
    if hasattr(model, "metis_report"):
        del model.metis_report
    TokenMask.unregister(model)
    if isinstance(model, PreTrainedModel) and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _check_layer(name: str, module: nn.Linear | Conv1D, config: MetisConfig) -> None:
    in_features, out_features = linear_shape(module)
    scheme = build_scheme(config, in_features, out_features)
    smaller = min(in_features, out_features)
    kept = kept_directions(config, in_features, out_features)
    if scheme.split_weight and config.rank_frac > 0.5:
        raise ValueError(
            f"rank_frac={config.rank_frac} keeps {kept} of {smaller} directions of {name}; "
            "choose at most 0.5"
        )


def _report(name: str, module: nn.Linear | Conv1D, layer: MetisLayer) -> LayerReport:
    o, i = layer.out_features, layer.in_features
    rank, error = None, 0.0
    quantizer = layer.scheme.fprop_weight.quantizer
    element_bits = 16.0 if quantizer is None else NVFP4.bits_per_element
    bits = element_bits
    if isinstance(layer, MetisLinear):
        rank = layer_rank(layer.config, i, o)
        bits += (element_bits * (o + i) * rank + 32 * rank) / (o * i)
        if not module.weight.is_meta:
            original = module.weight.detach().T if layer.conv1d else module.weight.detach()
            with torch.no_grad():
                scale = original.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
                error = ((layer.weight - original).abs().max() / scale).item()
    return LayerReport(name, i, o, rank, bits, error)
