"""Registers a loader with transformers that keeps NVFP4 bases packed in from_pretrained.

transformers picks the loader by `quant_method`. It has none for ModelOpt, so this module registers
its own and `from_pretrained(path)` works. For compressed-tensors, transformers' own loader unpacks
weights at the first forward pass. The config stored with the weights selects that loader, and no
argument overrides it; `packed_config` therefore returns a config with our `quant_method`.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from metis_hf.conversion.hub import register
from metis_hf.conversion.linears import why_not_plain
from metis_hf.deploy.packed_layouts import (
    COMPRESSED,
    MODELOPT,
    UNPACKED,
    PackedScheme,
    StoredTensor,
    check_layer,
    check_scales,
    compressed_config,
    read_headers,
    read_scheme,
)
from metis_hf.layers.packed import PackedLinear
from metis_hf.layers.parallelism import check_packed

if TYPE_CHECKING:
    from metis_hf.deploy.packed_experts import ExpertMatrix

METHOD = "metis-packed"
AS_CONFIGURED, HIGH_PRECISION = "as configured", "high precision"
ACTIVATIONS = (AS_CONFIGURED, HIGH_PRECISION)


class PackedConfig(QuantizationConfigMixin):
    """The quantization config of a packed base.

    `to_dict` returns compressed-tensors' config, so that `save_pretrained` writes a checkpoint that
    plain transformers and vLLM can read.

    Args:
        source: the checkpoint's `quantization_config`, or the contents of hf_quant_config.json.
        activations: "as configured" or "high precision".
        where: path or name of the checkpoint, for messages; "" if not known yet.
    """

    scheme: PackedScheme
    written: dict[str, Any] | None = None

    def __init__(
        self, source: dict[str, Any], activations: str = AS_CONFIGURED, where: str = ""
    ) -> None:
        if activations not in ACTIVATIONS:
            choices = " or ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activations={activations!r} is unknown; choose {choices}")
        self.quant_method: Any = METHOD
        self.source, self.activations, self.where = source, activations, where
        if where:
            self.read(where)

    def read(self, where: str) -> None:
        """Parse `source` as the config of the checkpoint `where`, or refuse it."""
        self.where, self.scheme = where, read_scheme(self.source, where)
        self.written = copy.deepcopy(self.scheme.written)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs=False, **kwargs: Any):
        if config_dict.get("quant_method") == METHOD:
            config = cls(**{k: config_dict[k] for k in ("source", "activations", "where")})
        else:  # a checkpoint's own
            config = cls(dict(config_dict))
        return (config, kwargs) if return_unused_kwargs else config

    def as_request(self) -> dict[str, Any]:
        """Return the `quantization_config` that makes transformers use this loader."""
        return {
            "quant_method": METHOD,
            "source": self.source,
            "activations": self.activations,
            "where": self.where,
        }

    def to_dict(self) -> dict[str, Any]:
        return self.as_request() if self.written is None else copy.deepcopy(self.written)


class _ModelOptLinear(nn.Module):
    """Holds a layer's tensors under ModelOpt's names until all are loaded."""

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__()
        self.layer = [layer]  # in a list, so that its buffers are not loaded
        self.register_buffer("weight", torch.empty_like(layer.weight_packed))
        self.register_buffer("weight_scale", torch.empty_like(layer.weight_scale))
        for name, there in (("weight_scale_2", True), ("input_scale", layer.scales_input)):
            value = layer.weight_global_scale.new_empty(()) if there else None
            self.register_buffer(name, value)
        self.register_parameter("bias", layer.bias)

    def finish(self) -> PackedLinear:
        """Return the filled layer, with tensor scales converted to encode scales."""
        layer: PackedLinear = self.layer[0]
        layer.weight_packed, layer.weight_scale = self.weight, self.weight_scale  # type: ignore
        layer.weight_global_scale = 1 / self.weight_scale_2.reshape(1)  # type: ignore
        if self.input_scale is not None:
            layer.input_global_scale = 1 / self.input_scale.reshape(1)  # type: ignore
        layer.bias = self.bias  # type: ignore[assignment]
        layer.follow(layer.weight_packed.device)
        return layer.train(self.training)


class PackedLoader(HfQuantizer):
    """Replaces nn.Linear by packed layers during from_pretrained."""

    requires_calibration = True  # it loads packed weights and cannot quantize
    quantization_config: PackedConfig
    names: Mapping[str, str]  # layer of an expert: name in the model -> name in files
    renaming: Any = None

    def _process_model_before_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        if not config.where:
            config.read(model.config.name_or_path or "the checkpoint")
        check_packed(model, config.where)
        files = kwargs.get("checkpoint_files") or []
        if not files or not all(str(path).endswith(".safetensors") for path in files):
            raise ValueError(
                f"{config.where} has no safetensors files, which packed weights are read from; "
                "give a directory or repository that has them"
            )
        # Imported here to avoid a cycle through transformers' models.
        from metis_hf.deploy.packed_experts import ExpertNames, unfuse_packed

        found, experts = _stored_layers(model, read_headers(files), config.scheme, config.where)
        places = unfuse_packed(model, experts, config.where)
        self.names = {place: name for name, place in places.items()}
        if places:
            self.renaming = ExpertNames.of(experts, places)
        for name, tensors in found.items():
            place = places.get(name, name)
            linear = model.get_submodule(place)
            assert isinstance(linear, nn.Linear)
            model.set_submodule(place, self._layer(name, linear, tensors))
        return model

    def _layer(self, name: str, linear: nn.Linear, tensors: dict[str, StoredTensor]) -> nn.Module:
        """Return the module that loads a packed layer in place of an nn.Linear."""
        config, scheme = self.quantization_config, self.quantization_config.scheme
        with torch.device("meta"):
            layer = PackedLinear(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                input_scale=scheme.names[3] in tensors,
                dtype=linear.weight.dtype,
                name=name,
            )
        quantizes = scheme.quantizes_input_of(name)
        shape = (linear.out_features, linear.in_features)
        check_layer(name, tensors, scheme.names, shape, quantizes)
        configured = quantizes is not False and layer.scales_input
        layer.quantizes_input = configured and config.activations == AS_CONFIGURED
        loading = layer if scheme.layout == COMPRESSED else _ModelOptLinear(layer)
        for key in scheme.names[2:]:  # scalars, stored with shape [] or [1]
            place = loading._buffers.get(key)
            if place is not None and key in tensors:
                loading._buffers[key] = place.new_empty(tensors[key].shape)
        return loading

    def get_weight_conversions(self):
        own = [] if self.renaming is None else [self.renaming]
        return [*super().get_weight_conversions(), *own]

    def _process_model_after_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        names = config.scheme.names
        for name, module in list(model.named_modules()):
            if not isinstance(module, PackedLinear | _ModelOptLinear):
                continue
            codes, scale, *others = (getattr(module, key) for key in names)
            given = {key: value for key, value in zip(names[2:], others) if value is not None}
            if not codes.is_meta:  # meta: offloaded to disk
                check_scales(name, codes, scale, given)
            if module.bias is not None:
                module.bias.requires_grad_(False)
            if isinstance(module, _ModelOptLinear):
                model.set_submodule(name, module.finish())
            else:
                for key, value in given.items():
                    module._buffers[key] = value.reshape(1)
        if config.written is None:
            config.written = _written(model, config.scheme, self.names)
        if config.scheme.dropped:
            warnings.warn(
                f"{config.where} also has {', '.join(config.scheme.dropped)}, which is not "
                "emulated and which save_pretrained omits",
                stacklevel=2,
            )
        return model

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model):
        adapters_alone = getattr(model, "_hf_peft_config_loaded", False)
        if model.dtype is not UNPACKED and not adapters_alone:
            raise ValueError(
                f"{self.quantization_config.where} was loaded in {model.dtype}, but readers of "
                f"this layout always unpack weights to {UNPACKED}, so the saved checkpoint would "
                "fail in its first forward pass. Save model.to(torch.bfloat16), which load_packed "
                "can load in any dtype"
            )
        return super().get_state_dict_and_metadata(model)

    @property
    def is_trainable(self) -> bool:
        return True  # for adapters; Trainer refuses to train the base itself

    @property
    def is_compileable(self) -> bool:
        return True


def _written(model: Any, scheme: PackedScheme, names: Mapping[str, str]) -> dict[str, Any]:
    # Imported here to avoid a cycle through transformers' models.
    from metis_hf.deploy.kept_experts import kept_experts

    inputs, ignore = {}, []
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            written = names.get(name, name)
            quantizes = scheme.quantizes_input_of(written) is not False
            inputs[written] = quantizes and module.scales_input
        elif isinstance(module, nn.Linear):
            ignore.append(name)
    return compressed_config(inputs, ignore, *kept_experts(model))


def _stored_layers(
    model: nn.Module, headers: dict[str, StoredTensor], scheme: PackedScheme, where: str
) -> tuple[dict[str, dict[str, StoredTensor]], dict[ExpertMatrix, str]]:
    """Find the model's layers that are packed in the files.

    Returns:
        (layer -> its tensors by the last part of their names; for expert matrices: matrix -> its
        name in the files, as transformers renames it).
    """
    layers: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for key, stored in headers.items():
        owner, _, last = key.rpartition(".")
        layers[owner][last] = stored
    codes, *scales = scheme.names

    def is_packed(tensors: dict[str, StoredTensor]) -> bool:
        if scheme.layout == MODELOPT and codes in tensors:  # a dense weight has the same name
            return tensors[codes].dtype == "U8" or not tensors.keys().isdisjoint(scales)
        return not tensors.keys().isdisjoint(scheme.names)

    packed = {name: tensors for name, tensors in layers.items() if is_packed(tensors)}
    if not packed:
        raise ValueError(
            f"{where} has no packed weight ({codes}); load it without load_packed, or correct "
            "its quantization config"
        )
    return _in_model(model, packed, where)


def _in_model(
    model: Any, packed: dict[str, dict[str, StoredTensor]], where: str
) -> tuple[dict[str, dict[str, StoredTensor]], dict[ExpertMatrix, str]]:
    """Map layers in the files to their names in the model, which transformers may rename."""
    # Imported here to avoid a cycle: transformers' models import its quantizers, which import this.
    from transformers.core_model_loading import rename_source_key

    from metis_hf.conversion.naming import name_mapping
    from metis_hf.deploy.packed_experts import all_matrices

    renamings, converters = name_mapping(model)
    state = model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tied = set(tied) | set(tied.values())
    matrices = all_matrices(model)
    known = {**state, **{f"{name}.weight": True for name in matrices}}
    found, experts = {}, {}
    for name, tensors in packed.items():
        stored = f"{name}.weight"
        key, _ = rename_source_key(stored, renamings, [], model.base_model_prefix, known)
        if matrix := matrices.get(key.removesuffix(".weight")):
            found[matrix.name] = tensors
            experts[matrix] = rename_source_key(stored, renamings, [])[0].removesuffix(".weight")
            continue
        key, merged = rename_source_key(
            stored, renamings, converters, model.base_model_prefix, state
        )
        if merged is not None or ".experts." in f".{name}.":
            raise ValueError(
                f"{where}: {name} is packed, but it is part of a fused tensor of the model ({key}; "
                "usually experts), and load_packed keeps only linear layers packed. Load the "
                "checkpoint dense (CompressedTensorsConfig(dequantize=True)), or exclude this "
                "layer when quantizing"
            )
        target = key.removesuffix(".weight")
        try:
            module = model.get_submodule(target)
        except AttributeError:
            continue  # a head that this class lacks; transformers reports it
        if not isinstance(module, nn.Linear) or why_not_plain(module) is not None:
            raise ValueError(
                f"{where}: {name} is packed, but it is a {type(module).__name__} in the model, and "
                "load_packed keeps only plain linear layers packed. Exclude it when quantizing"
            )
        if key in tied:
            raise ValueError(
                f"{where}: {name} is packed, but the config ties its weight to another weight "
                "(tie_word_embeddings). One of the two is wrong; set tie_word_embeddings=False if "
                "both weights were saved"
            )
        found[target] = tensors
    if not found:
        raise ValueError(
            f"{where} has packed layers ({next(iter(packed))}, ..), but "
            f"{type(model).__name__} has none of them; load it as the class that config.json names"
        )
    return found, experts


register(METHOD, PackedConfig, PackedLoader)
register(MODELOPT, PackedConfig, PackedLoader)
