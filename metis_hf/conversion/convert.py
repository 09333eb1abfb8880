"""get_metis_model converts any transformers model in place; to_dense reverts it.

All checks run before the first layer is replaced, so an error leaves the model unchanged. Layers
are replaced one by one, so memory never holds a second copy of the model. Loading of checkpoints is
in `hub`, selection of modules in `select`, the report in `report`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from metis_hf.config import MetisConfig
from metis_hf.conversion.attention import install_attention, remove_attention, select_attention
from metis_hf.conversion.candidates import AS_THEY_ARE, Naming, config_for, owner_of, places
from metis_hf.conversion.heads import output_head
from metis_hf.conversion.linears import LinearOrigin
from metis_hf.conversion.parts import forget_part, watch_part
from metis_hf.conversion.refusals import check_layer, check_model, check_present, check_tied
from metis_hf.conversion.replacing import (
    leave_fast_path,
    offloaded,
    replace_module,
    restore_fast_path,
)
from metis_hf.conversion.report import (
    ConversionReport,
    LayerReport,
    count_params,
    gemm_weights,
    precision_fields,
)
from metis_hf.conversion.select import select_modules
from metis_hf.layers.experts import (
    converted_names,
    expert_shape,
    fuse_again,
    fused_bias,
    fused_weights,
    packed_names,
    replace_fused,
    unpack_again,
)
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.make import as_linear, convert_linear, linear_shape, make_layer
from metis_hf.layers.packed import packed_layers
from metis_hf.layers.parallelism import is_sharded
from metis_hf.layers.token_mask import DECODER_MASK, TokenMask
from metis_hf.schemes.unread import unread_fields

logger = logging.get_logger(__name__)


def metis_layers(model: nn.Module) -> Iterator[tuple[str, MetisLayer]]:
    """Yield (name, layer) for every converted layer."""
    for name, module in model.named_modules():
        if isinstance(module, MetisLayer):
            yield name, module


def get_metis_model(model: nn.Module, config: MetisConfig | None = None) -> nn.Module:
    """Replace the target linear layers of `model` with quantized ones, in place.

    Fused experts of mixture-of-experts models are converted too, one layer per expert. Call this
    before the optimizer, `Trainer`, DDP or FSDP sees the model: a split weight is stored in new
    parameters. The report is in `model.metis_report`.

    Args:
        model: any transformers model, or any module with nn.Linear or Conv1D layers.
        config: default `MetisConfig()`.

    Returns:
        The same model.

    Raises:
        ValueError: unknown scheme, no layer selected, a rank above half of a layer's directions,
            a tied weight in a scheme that stores weights split, `backend="native"` where a scheme
            or this machine does not support it, `attention` where the scheme or the model does not
            support it, non-finite weights, a model that is already converted or wrapped by DDP,
            FSDP or torch.compile. The model is then unchanged.
        TypeError: `model` is not a module, or `config` is not a `MetisConfig`.
        NotImplementedError: transformers has already distributed the model over processes.
    """
    return convert(model, MetisConfig() if config is None else config)


def convert(
    model: nn.Module,
    config: MetisConfig,
    *,
    check_names: bool = True,
    naming: Naming = AS_THEY_ARE,
    loading: bool = False,
) -> nn.Module:
    """Convert a model like `get_metis_model`, with options for loading a checkpoint.

    Args:
        model, config: as in `get_metis_model`.
        check_names, naming: as in `select_modules`.
        loading: weights are loaded later, so parameters on the meta device are accepted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"get_metis_model converts a loaded model; got {model!r:.80}")
    if not isinstance(config, MetisConfig):
        raise TypeError(f"config={config!r:.80} is not a MetisConfig; pass MetisConfig(scheme=...)")
    check_model(model)
    selection = select_modules(model, config, check_names=check_names, naming=naming)
    configs = {name: config_for(called, config) for name, called in selection.called.items()}
    partly = not loading and not all(param.is_meta for param in model.parameters())
    for name in selection.linears:
        module = as_linear(model.get_submodule(name))
        check_present(name, module, module.weight, partly=partly)
        check_layer(name, module.weight, *linear_shape(module), configs[name])
        if name in selection.tied:
            check_tied(name, selection.tied[name], *linear_shape(module), configs[name])
    for name in selection.experts:
        experts, key = owner_of(model, name)
        weight = fused_weights(experts)[key]
        check_present(name, experts, weight, partly=partly)
        check_layer(name, weight, *expert_shape(experts, key), configs[name])
    attention = select_attention(model, config, (*selection.linears, *selection.experts))
    _warn_of_unread(config)
    total = count_params(model)
    costs = gemm_weights(model)
    converted = sum(costs[name] for name in (*selection.linears, *selection.experts))

    _own_configs(model)
    masks = _TokenMasks(model)
    reports: list[LayerReport] = []
    everywhere = places(model)
    for name in selection.linears:
        names, called = everywhere[model.get_submodule(name)], selection.called[name][0]
        reports.append(_convert_linear(model, names, called, configs[name], masks))
    for name in selection.experts:
        called = selection.called[name][0]
        reports += _convert_experts(model, name, called, configs[name], masks)
    install_attention(model, config, attention)
    leave_fast_path(model)
    watch_part(model)

    model.metis_report = ConversionReport(  # type: ignore[assignment]
        config.scheme,
        tuple(reports),
        selection.skipped,
        total,
        converted / max(sum(costs.values()), 1),
        config.attention,
        attention,
        tuple(name for name in selection.skipped if name not in costs),
    )
    masks.register(model)
    if isinstance(model, PreTrainedModel):
        model.config.quantization_config = config
        model.add_model_tags(["metis", "fp4-training"])
    return model


def _warn_of_unread(config: MetisConfig) -> None:
    def say(fields: list[str], reason: str) -> None:
        if fields:
            given = ", ".join(f"{name}={getattr(config, name)!r}" for name in fields)
            logger.warning("%s has no effect: %s", given, reason)

    unread = unread_fields(config)
    never = unread_fields(config.replace(rank=None)) if unread and config.rank else unread
    schemes = " or ".join(dict.fromkeys([config.scheme, *config.scheme_pattern.values()]))
    say([name for name in unread if name in never], f"scheme {schemes} does not use it")
    say([name for name in unread if name not in never], f"rank={config.rank} overrides it")


def to_dense(model: nn.Module) -> nn.Module:
    """Replace every converted layer with a plain one that has the weight it represents, in place.

    Packed layers (`load_packed`) are unpacked to the model's dtype, also under adapters; PEFT's
    `merge_and_unload` then merges the adapters exactly.

    Returns:
        The same model, now a plain transformers model; its checkpoints do not need metis_hf.

    Raises:
        ValueError: the model has no converted or packed layer, has adapters on converted layers, or
            has sharded or offloaded parameters.
    """
    layers, packed = dict(metis_layers(model)), packed_layers(model)
    if not layers and not packed:
        raise ValueError("the model has no Metis layer, so there is nothing to revert")
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "the model's parameters are sharded over processes (FSDP2 or ZeRO-3): save a full "
            "checkpoint, load it in one process and call to_dense there"
        )
    if away := [name for name, layer in layers.items() if offloaded(layer)]:
        raise ValueError(
            f"{away[0]} is offloaded (device_map with parts on the CPU or on disk): load the "
            "checkpoint without device_map and call to_dense there"
        )
    if adapted := [name for name in layers if name.endswith(".base_layer")]:
        raise ValueError(
            f"{len(adapted)} converted layers have adapters, such as {adapted[0]}: call "
            "model.merge_and_unload() or model.unload() before to_dense"
        )
    converted = owners(model)
    remove_attention(model)
    for module in model.modules():
        for key in converted_names(module):
            fuse_again(module, key)
        for key in packed_names(module):
            unpack_again(module, key)
    everywhere = places(model)
    for _, layer in metis_layers(model):
        dense = layer.to_dense()
        dense = layer.origin.restore(dense) if layer.origin else dense
        replace_module(model, everywhere[layer], dense)
    for frozen in packed_layers(model).values():
        replace_module(model, everywhere[frozen], frozen.to_dense())
    restore_fast_path(model)
    if packed:
        unmark_quantized(model)
        converted += [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    for owner in converted:
        vars(owner).pop("metis_report", None)
        TokenMask.unregister(owner)
        forget_part(owner)
        if isinstance(owner, PreTrainedModel):
            vars(owner.config).pop("quantization_config", None)
    return model


def owners(model: nn.Module) -> list[nn.Module]:
    """Return the converted submodels of a model: several if they were converted one by one.

    If no submodel has a report, as in a copy made by a framework, return the model itself.
    """
    return [each for each in model.modules() if "metis_report" in vars(each)] or [model]


def unmark_quantized(model: nn.Module) -> None:
    """Remove the attributes that transformers sets on a model loaded with a quantizer."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.is_quantized = False  # type: ignore[assignment]
            for name in ("hf_quantizer", "quantization_method"):
                vars(module).pop(name, None)
            vars(module.config).pop("_is_quantized", None)


# Names of cross-attention modules: T5's, BART's, BERT's and GPT-2's, T5Gemma's and ProphetNet's,
# NLLB-MoE's, Pix2Struct's.
_CROSS_ATTENTION = {
    "EncDecAttention",
    "encoder_attn",
    "crossattention",
    "cross_attn",
    "cross_attention",
    "encoder_decoder_attention",
}
# The last ones are ProphetNet's and GPT-2's; GPT-2 has keys and values in one layer.
_KEYS_AND_VALUES = (
    "k",
    "v",
    "k_proj",
    "v_proj",
    "key",
    "value",
    "key_proj",
    "value_proj",
    "c_attn",
)

# In the name of a class whose keys and values read both decoder and encoder rows: T5Gemma 2.
_MERGED_ATTENTION = "MergedAttention"


class _TokenMasks:
    """The token masks of a model: one, or two for an encoder-decoder model."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens = TokenMask("attention_mask")
        both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        self.decoder = TokenMask(DECODER_MASK) if both else None
        head = output_head(model)
        self.heads = {name for name, module in model.named_modules() if module is head}
        self.merged = {
            name
            for name, module in model.named_modules()
            if _MERGED_ATTENTION in type(module).__name__
        }

    def of(self, name: str) -> TokenMask | None:
        """Return the mask for the named layer; output heads take the decoder's.

        Return None for a layer that reads both decoder and encoder rows: their masks cannot be told
        apart by shape.
        """
        parts = name.split(".")
        if parts[-1] in _KEYS_AND_VALUES and ".".join(parts[:-1]) in self.merged:
            return None
        of_encoder = parts[-1] in _KEYS_AND_VALUES and bool(_CROSS_ATTENTION & set(parts))
        in_decoder = not of_encoder and ("decoder" in parts or name in self.heads)
        return self.decoder if self.decoder is not None and in_decoder else self.tokens

    def register(self, model: nn.Module) -> None:
        for mask in (self.tokens, self.decoder):
            if mask is not None:
                mask.register(model)


def _convert_linear(
    model: nn.Module, names: list[str], called: str, config: MetisConfig, masks: _TokenMasks
) -> LayerReport:
    name = names[0]
    module = as_linear(model.get_submodule(name))
    layer = convert_linear(module, config, name=called, token_mask=masks.of(name))
    layer.origin = LinearOrigin.of(module)
    replace_module(model, names, layer)
    original = module.weight.detach()
    matrix = original.T if isinstance(module, Conv1D) else original
    return _report(name, type(module).__name__, matrix, layer)


def _convert_experts(
    model: nn.Module, name: str, called: str, config: MetisConfig, masks: _TokenMasks
) -> list[LayerReport]:
    module, key = owner_of(model, name)
    fused, bias = fused_weights(module)[key], fused_bias(module, key)
    conv1d = bool(module.is_transposed) and bias is not None  # a Conv1D always has a bias
    layers, reports = [], []
    for index, weight in enumerate(fused.detach()):
        matrix = weight.T if module.is_transposed else weight  # [o i]
        layer = make_layer(
            _copy(weight if conv1d else matrix, fused),
            None if bias is None else _copy(bias.detach()[index], bias),
            config,
            name=f"{called}.{index}",
            conv1d=conv1d,
            token_mask=masks.of(name),
        )
        layers.append(layer.train(module.training))
        reports.append(_report(f"{name}.{index}", "expert", matrix, layer))
    replace_fused(module, key, layers)
    return reports


def _copy(part: Tensor, whole: nn.Parameter) -> nn.Parameter:
    """Return a slice of a parameter as a new parameter, frozen if `whole` is."""
    part = part.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def _own_configs(model: nn.Module) -> None:
    """Copy the configs of a model: other models may share them."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)  # type: ignore[assignment]


def _report(name: str, kind: str, original: Tensor, layer: MetisLayer) -> LayerReport:
    error = 0.0
    if layer.weight_form.is_split and not original.is_meta:
        with torch.no_grad():
            scale = original.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            weight = layer.weight_form.dense(layer.weight_params())
            error = ((weight - original).abs().max() / scale).item()
    i, o = layer.in_features, layer.out_features
    return LayerReport(name, kind, i, o, error=error, **precision_fields(layer))
