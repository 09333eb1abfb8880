"""Adapters that ask for what a converted base does not have, or cannot say what it is."""

from __future__ import annotations

import re
import warnings

import pytest
from conftest import llama
from peft import LoraConfig, PeftModel, get_peft_model

from conversion.architectures import ARCHITECTURES
from conversion.lora_tools import lora_config, lora_layers
from metis_hf import MetisConfig, get_metis_model

EXPERTS = "model.layers.0.mlp.experts"
FUSED = {
    "by PEFT's names of Mixtral": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    "as parameters": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "as modules": {"target_modules": ["q_proj", "gate_up_proj", "down_proj"]},
    "one in full": {"target_modules": ["q_proj"], "target_parameters": [f"{EXPERTS}.down_proj"]},
}


def mixtral(**options):
    return get_metis_model(ARCHITECTURES["mixtral"].build(), MetisConfig(scheme="bf16", **options))


@pytest.mark.parametrize("form", FUSED)
def test_fused_experts_of_a_converted_base(form):
    message = (
        rf"asks for fused experts \(target_\w+: .*down_proj.*{EXPERTS}\.\w+\); PEFT would leave "
        rf".*all-linear.*{EXPERTS}\.metis_\w+\.0"
    )
    with pytest.raises(ValueError, match=message):
        get_peft_model(mixtral(), LoraConfig(**FUSED[form]))


def test_an_adapter_that_was_trained_on_fused_experts(tmp_path):
    """Refused, and taken where it fits: the way out that the message names."""
    config = LoraConfig(**FUSED["by PEFT's names of Mixtral"])
    get_peft_model(ARCHITECTURES["mixtral"].build(), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"modules_to_not_convert=\['experts'\]"):
        PeftModel.from_pretrained(mixtral(), tmp_path)
    loaded = PeftModel.from_pretrained(mixtral(modules_to_not_convert=["experts"]), tmp_path)
    assert sum("experts" in name for name, _ in loaded.named_parameters() if "lora_A" in name) == 4


def test_names_of_layers_are_not_refused():
    """Also one that fused experts and other layers have: PEFT takes the layers, as of any base."""
    model = get_metis_model(ARCHITECTURES["qwen2-moe"].build(), MetisConfig(scheme="bf16"))
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"]))
    assert {re.sub(r".*\d\.", "", name) for name in lora_layers(model)} == {
        "self_attn.q_proj",
        "mlp.shared_expert.down_proj",
    }
    model = get_peft_model(mixtral(), LoraConfig(target_modules=[f"{EXPERTS}.metis_down_proj.0"]))
    assert set(lora_layers(model)) == {f"{EXPERTS}.metis_down_proj.0"}


@pytest.mark.parametrize("part", [True, False])
def test_a_base_of_which_a_part_is_converted(part):
    """Its config cannot be recorded in the adapter."""
    model = llama(1)
    get_metis_model(model.model if part else model, MetisConfig(scheme="bf16"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = get_peft_model(model, lora_config(target_modules=["q_proj"]))
    said = [
        str(each.message) for each in caught if "does not say that its base" in str(each.message)
    ]
    assert len(said) == part
    assert bool(getattr(model.peft_config["default"], "metis_config", None)) is not part
