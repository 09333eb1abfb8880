"""Registers Metis with transformers, so that from_pretrained loads and converts Metis models.

The quantizer is only a loader: it swaps the layers before the weights arrive (a Metis checkpoint)
or converts after (a dense one with `quantization_config=MetisConfig(...)`), then removes itself.
What remains is an ordinary trainable model; transformers' rules for frozen quantized models (no
training, its own state dict on save) do not apply to it.
"""

from __future__ import annotations

from typing import Any

from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from metis_hf.config import MetisConfig
from metis_hf.model import get_metis_model


class MetisConfigLoader(QuantizationConfigMixin):
    """What transformers looks up for quant_method "metis"; it gives a plain MetisConfig."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs=False, **kwargs: Any):
        config = MetisConfig.from_dict({**config_dict, **kwargs})
        return (config, {}) if return_unused_kwargs else config


class MetisLoader(HfQuantizer):
    """Converts a model on its way through from_pretrained."""

    def _process_model_before_weight_loading(self, model, **kwargs):
        if self.pre_quantized:
            get_metis_model(model, self.quantization_config)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        if not self.pre_quantized:
            get_metis_model(model, self.quantization_config)
        for name in ("hf_quantizer", "quantization_method"):
            if hasattr(model, name):
                delattr(model, name)
        model.is_quantized = False
        for module in model.modules():
            config = getattr(module, "config", None)
            if getattr(config, "_is_quantized", False):
                config._is_quantized = False
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True


def register() -> None:
    """Makes transformers know quant_method "metis"; does nothing the second time."""
    if MetisConfig.quant_method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(MetisConfig.quant_method)(MetisConfigLoader)
    if MetisConfig.quant_method not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(MetisConfig.quant_method)(MetisLoader)
