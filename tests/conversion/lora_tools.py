"""A converted model with LoRA adapters, and what is compared of it."""

from __future__ import annotations

from peft import LoraConfig, get_peft_model

from metis_hf import MetisConfig, MetisLinear, get_metis_model
from metis_hf.conversion.lora import MetisLoraLinear


def lora_config(**changes) -> LoraConfig:
    """B is random, so that the branch does something."""
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
        | changes
    )


def adapted(model, scheme="metis", split=None, rank=None, **changes):
    """(PeftModel over the converted model, W + scaling B A in fp64 by name of layer)."""
    get_metis_model(model, MetisConfig(scheme=scheme, split_weight=split, rank=rank))
    model = get_peft_model(model, lora_config(**changes))
    expected = {}
    for name, layer in lora_layers(model).items():
        delta = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        w = layer.base.weight.T if is_transposed(layer.base) else layer.base.weight
        expected[name] = w.double() + layer.scaling["default"] * delta
    return model, expected


def is_transposed(layer) -> bool:
    return layer.conv1d and not isinstance(layer, MetisLinear)


def lora_layers(model) -> dict[str, MetisLoraLinear]:
    """Name within the transformers model -> adapted layer."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, MetisLoraLinear)
    }


def base_state(model):
    return {k: v.clone() for k, v in model.state_dict().items() if "lora_" not in k}
