"""Merges LoRA adapters into a packed NVFP4 base and reports the requantization error."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from metis_hf.conversion.lora import PackedLoraLinear
from metis_hf.layers.packed import PackedLinear, PackedWeight, encode_scale, packed_layers
from metis_hf.numerics import relative_error


@dataclass(frozen=True)
class MergedLayer:
    """The error of one layer's merge; W is the packed weight, BA the adapters with their scaling.

    Attributes:
        name: layer name in the base model.
        change: |BA| / |W + BA| (Frobenius norms).
        error: |Q(W + BA) - (W + BA)| / |W + BA|.
    """

    name: str
    change: float
    error: float


@dataclass(frozen=True)
class MergeReport:
    """The relative error of each requantized layer; prints as a table."""

    layers: tuple[MergedLayer, ...]

    @property
    def mean_error(self) -> float:
        """Mean over the layers."""
        return sum(layer.error for layer in self.layers) / len(self.layers)

    def __str__(self) -> str:
        header = ("layer", "adapter", "error of requantizing")
        rows = [(each.name, f"{each.change:.2%}", f"{each.error:.2%}") for each in self.layers]
        return "\n".join(" | ".join(cells) for cells in (header, *rows))


@torch.no_grad()
def merge_packed(
    model: PeftModel, *, requantize: bool = False, adapter_names: list[str] | None = None
) -> tuple[PreTrainedModel, MergeReport]:
    """Merge LoRA adapters into a packed base and quantize it to NVFP4 again.

    W lies on the NVFP4 grid and W + BA does not: quantizing W + BA costs about 8 % of its norm,
    often more than the adapter's change. Measure the held-out loss to see whether that matters; an
    unmerged adapter has no such error. Layers that shared a tensor scale (q, k and v, gate and up,
    which vLLM fuses) share a new one if all of them have an adapter; otherwise they keep the old
    scale, and values that exceed its range saturate.

        >>> packed, report = merge_packed(peft_model, requantize=True)  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP

    Args:
        model: a PEFT model over a packed base (`get_peft_model`, `PeftModel.from_pretrained`).
        requantize: confirms that you accept the error. False merges nothing and raises a
            ValueError that states the error.
        adapter_names: adapters to merge; default: the active ones.

    Returns:
        (the base model, packed again and without adapters; the error of each layer).

    Raises:
        ValueError: `requantize=False`; no packed layer has such an adapter; an adapter has NaN or
            inf. The model is then unchanged.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, PackedLoraLinear)
        and isinstance(layer.get_base_layer(), PackedLinear)
        and layer.adapters_to_merge(adapter_names)
    }
    if not layers or not isinstance(model, PeftModel):
        asked = "adapter" if adapter_names is None else f"adapter named {adapter_names}"
        raise ValueError(
            f"{type(model).__name__} has no {asked} on a packed layer, so there is nothing to "
            "merge; pass the model that get_peft_model or PeftModel.from_pretrained returned"
        )
    for layer in layers.values():
        for name in layer.adapters_to_merge(adapter_names):
            layer.check_merge(name, _base(layer).bias, safe_merge=True)
    _check_others(model, adapter_names)
    scales = _scales(model, layers, adapter_names)
    report = MergeReport(
        tuple(_cost(layer, scales[name], adapter_names) for name, layer in layers.items())
    )
    if not requantize:
        worst = max(report.layers, key=lambda each: each.error)
        raise ValueError(
            f"merging quantizes {len(report.layers)} layers to NVFP4 again, with an error of "
            f"{report.mean_error:.2%} of the merged weight on average and {worst.error:.2%} in "
            f"{worst.name}. Pass requantize=True to accept this error, keep the adapter separate "
            "from the base (save_pretrained), or unpack the base first (metis_hf.to_dense(model), "
            "then merge_and_unload)"
        )
    for name, layer in layers.items():
        layer.requantize = scales[name]
    merged = model.merge_and_unload(adapter_names=adapter_names)
    return merged, report


def _check_others(model: PeftModel, adapter_names: list[str] | None) -> None:
    """Refuse adapters with NaN or inf on layers that are not packed, such as a head."""
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or isinstance(layer, PackedLoraLinear):
            continue
        known = {*layer.lora_A, *layer.lora_embedding_A}
        for name in known.intersection(adapter_names or layer.active_adapters):
            delta = cast(Any, layer).get_delta_weight(name)
            if not bool(torch.isfinite(delta).all()):
                raise ValueError(f"adapter {name!r} has NaN or inf in {path}; nothing was merged")


def _base(layer: PackedLoraLinear) -> PackedLinear:
    base = layer.get_base_layer()
    assert isinstance(base, PackedLinear)
    return base


def _cost(layer: PackedLoraLinear, scale: Tensor, adapter_names: list[str] | None) -> MergedLayer:
    base, weight = _base(layer), layer.merged_weight(adapter_names)
    again = PackedWeight.of(weight, scale).dense(torch.float32)
    change = relative_error(weight, base.packed.dense(torch.float32))
    return MergedLayer(base.name, float(change), float(relative_error(weight, again)))


def _scales(
    model: nn.Module, layers: dict[str, PackedLoraLinear], adapter_names: list[str] | None
) -> dict[str, Tensor]:
    """Return layer name -> encode scale [1] of its merged weight; see `merge_packed`."""
    siblings: dict[tuple[str, float], list[str]] = defaultdict(list)
    for name, packed in packed_layers(model).items():
        name = name.removesuffix(".base_layer")
        siblings[name.rpartition(".")[0], float(packed.weight_global_scale)].append(name)
    scales: dict[str, Tensor] = {}
    for names in siblings.values():
        merging = [name for name in names if name in layers]
        if not merging:
            continue
        old = _base(layers[merging[0]]).weight_global_scale
        own = [encode_scale(layers[name].merged_weight(adapter_names)) for name in merging]
        smallest = torch.stack([scale.to(old.device) for scale in own]).amin(0)
        scale = smallest if len(merging) == len(names) else old
        scales |= {name: scale.clone() for name in merging}
    return scales
