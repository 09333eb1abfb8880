"""Registers Metis with transformers, so that from_pretrained loads and converts Metis models.

The quantizer is only a loader. It replaces the layers before the weights are loaded (a Metis
checkpoint, or a model distributed over processes) or converts the model afterwards (a dense
checkpoint with `quantization_config=MetisConfig(...)`), then removes itself. The result is an
ordinary trainable model: transformers' rules for frozen quantized models (no training, a separate
state dict on save) do not apply to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from metis_hf.config import MetisConfig
from metis_hf.layers.parallelism import check_plan, planned
from metis_hf.shared.messages import some

# `conversion.convert` and its importers are imported inside functions: `registration` imports this
# module during the import of transformers' quantizers, which transformers' models import.


def read_config(values: Mapping[str, Any]) -> MetisConfig:
    """Return the config of a checkpoint or an adapter, with `backend` adapted to this machine."""
    config = MetisConfig.from_dict(dict(values))
    # The machine that saved it had FP4 units; this one may not.
    return config.replace(backend="auto") if config.backend == "native" else config


class MetisConfigLoader(QuantizationConfigMixin):
    """The config class of quant_method "metis" in transformers; `from_dict` makes a MetisConfig."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs=False, **kwargs: Any):
        config = read_config({**config_dict, **kwargs})
        return (config, {}) if return_unused_kwargs else config


class MetisLoader(HfQuantizer):
    """Converts a model inside from_pretrained."""

    def _process_model_before_weight_loading(self, model, **kwargs):
        from metis_hf.conversion.convert import convert
        from metis_hf.conversion.distributed import check_dense_checkpoint, cut_layers
        from metis_hf.conversion.naming import saved_naming

        check_plan(model)
        config, files = self.quantization_config, kwargs.get("checkpoint_files") or ()
        self._is_distributed = bool(planned(model))
        if self.pre_quantized:
            naming = saved_naming(model, config, files)
            convert(model, config, check_names=False, naming=naming, loading=True)
            cut_layers(model)
            _check_shapes(model, files)
        elif self._is_distributed:  # converted before it is sharded
            convert(model, config, loading=True)
            check_dense_checkpoint(model)
            cut_layers(model)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        from metis_hf.conversion.convert import get_metis_model, unmark_quantized
        from metis_hf.conversion.distributed import join_layers

        if self.pre_quantized:
            _check_complete(model)
        elif not self._is_distributed:
            get_metis_model(model, self.quantization_config)
        join_layers(model)
        unmark_quantized(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _check_shapes(model: nn.Module, files: Iterable[str]) -> None:
    """Refuse factors of another rank, by name; transformers would only log a warning."""
    from metis_hf.conversion.convert import metis_layers

    expected = {
        f"{name}.{key}": tuple(param.shape)
        for name, layer in metis_layers(model)
        for key, param in layer.named_parameters(recurse=False)
    }
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, "pt") as tensors:
            for key in expected.keys() & set(tensors.keys()):
                shape = tuple(tensors.get_slice(key).get_shape())
                if shape != expected[key]:
                    raise ValueError(
                        f"{key} has shape {shape} in {path}, but its config.json requires "
                        f"{expected[key]}: the two are from different runs, or the config was "
                        "edited (rank, rank_frac, rank_multiple, rank_pattern)"
                    )


def _check_complete(model: nn.Module) -> None:
    """Refuse a checkpoint without all tensors of converted layers: they would be random."""
    from metis_hf.conversion.convert import metis_layers

    def loaded(tensor: Tensor) -> bool:
        # transformers marks the tensors it loads. Tensors on meta stay on disk until they are used.
        return tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)

    missing = [
        f"{name}.{key}"
        for name, layer in metis_layers(model)
        for key, tensor in (*layer.named_parameters(recurse=False), *layer.state_buffers().items())
        if not loaded(tensor)
    ]
    if missing and any(loaded(param) for param in model.parameters()):
        path = getattr(getattr(model, "config", None), "name_or_path", "") or "the checkpoint"
        raise ValueError(
            f"{path} lacks tensors of converted layers: {some(missing)}. Nothing can replace "
            "them; restore the files, or correct quantization_config in its config.json"
        )


def register(method: str, config_class: type, loader: type[HfQuantizer]) -> None:
    """Register a config class and a loader for a `quant_method` that transformers does not have."""
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(method)(config_class)
    if method not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(method)(loader)


register(MetisConfig.quant_method, MetisConfigLoader, MetisLoader)
