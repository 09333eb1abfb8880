"""Checks before conversion: refuse models and layers that cannot be converted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.conversion.linears import is_linear
from metis_hf.conversion.replacing import offloaded
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.native import why_emulated
from metis_hf.layers.packed import packed_layers
from metis_hf.layers.parallelism import check_whole
from metis_hf.schemes import build_scheme, kept_directions, most_directions

DEEPSPEED_MARKS = ("ds_id", "_hp_mapping")  # attributes of parameters: ZeRO-3; ZeRO-1 and ZeRO-2


def check_model(model: nn.Module) -> None:
    """Refuse a model that is already converted, quantized, wrapped, adapted or distributed."""
    if is_linear(model):
        raise ValueError(
            f"the model is a single {type(model).__name__}, which cannot be replaced in place; "
            "wrap it in a module, such as torch.nn.Sequential(layer)"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, MetisLayer):
            raise ValueError(
                f"the model is already converted ({name} runs scheme {layer.config.scheme!r}); "
                "call to_dense(model) first"
            )
    packed = next(iter(packed_layers(model)), None)
    if packed is not None:
        raise ValueError(
            f"{packed} is packed in NVFP4 and frozen, so it has no weight to train in a scheme. "
            "Train a PEFT adapter over it, or call to_dense(model) first"
        )
    for name, module in model.named_modules():
        quantizer: Any = getattr(module, "hf_quantizer", None)
        method = quantizer and quantizer.quantization_config.quant_method
        if isinstance(module, PreTrainedModel) and method not in (None, MetisConfig.quant_method):
            raise ValueError(
                f"{name or 'the model'} is already quantized by "
                f"{getattr(method, 'value', method)}, which uses its own layers and checkpoint "
                "format. Load the dense model, or load this one with "
                "quantization_config=...(dequantize=True) if that method supports it"
            )
        ddp = isinstance(module, nn.parallel.DistributedDataParallel)
        fsdp = type(module).__name__.startswith(("FSDP", "FullySharded"))
        if ddp or fsdp or hasattr(module, "_orig_mod"):  # the last: torch.compile
            raise ValueError(
                f"{name or 'the model'} is already wrapped ({type(module).__name__}); convert the "
                "model before you pass it to accelerator.prepare, DDP, FSDP or torch.compile"
            )
        if any(cls.__module__.startswith("peft.") for cls in type(module).__mro__):
            raise ValueError(
                f"the model already has PEFT adapters ({name or 'it'} is PEFT's "
                f"{type(module).__name__}), and their layers would be quantized too. Convert the "
                "base model first, then add the adapters (get_peft_model or model.add_adapter)"
            )
    if any(hasattr(p, mark) for p in model.parameters() for mark in DEEPSPEED_MARKS):
        raise ValueError(
            "DeepSpeed already manages the model's parameters (ZeRO-3 has partitioned them); build "
            "and convert the model before you use TrainingArguments(deepspeed=...), "
            "accelerator.prepare or deepspeed.zero.Init"
        )
    check_whole(model)


def check_present(name: str, module: nn.Module, weight: Tensor, *, partly: bool) -> None:
    """Refuse a layer whose weight is offloaded.

    `partly` says that some parameters of the model are not on the meta device.
    """
    if offloaded(module) or (partly and weight.is_meta):
        raise ValueError(
            f"{name}: its weight is offloaded (device_map with parts on the CPU or on disk, "
            "accelerate's cpu_offload), so it cannot be converted or trained. Load the "
            "model without device_map, convert it and save it; the converted checkpoint can be "
            "loaded with a device_map. Or exclude the layer with modules_to_not_convert"
        )


def check_layer(
    name: str, weight: Tensor, in_features: int, out_features: int, config: MetisConfig
) -> None:
    """Refuse a layer if the rank is too large, the backend unavailable or the weight not finite."""
    scheme = build_scheme(config, in_features, out_features)
    kept = kept_directions(config, in_features, out_features)
    most = most_directions(in_features, out_features)
    if scheme.splits and kept > most:
        absolute = config.rank is not None
        asked = f"rank={kept}" if absolute else f"rank_frac={config.rank_frac}"
        raise ValueError(
            f"{asked} keeps {kept} of {min(in_features, out_features)} directions of {name}; "
            f"choose at most {most if absolute else 0.5}"
        )
    try:
        why_emulated(config, scheme, weight.device)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise ValueError(
            f"{name}: the weight has NaN or infinite elements; load weights that are finite"
        )


def check_tied(
    name: str, other: str, in_features: int, out_features: int, config: MetisConfig
) -> None:
    """Refuse a scheme that would store factors instead of a weight that another module shares."""
    if build_scheme(config, in_features, out_features).weight.is_split:
        raise ValueError(
            f"{name} shares its weight with {other}, but scheme {config.scheme!r} as configured "
            "stores weights as u, s, vh and residual, which would untie the two. Store one matrix "
            "(split_weight=False, or another scheme for this layer in scheme_pattern), remove the "
            "layer from target_modules, or untie the weights in the model's config "
            "(tie_word_embeddings=False)"
        )
