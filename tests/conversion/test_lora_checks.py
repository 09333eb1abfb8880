"""Adapters that ask for what a converted base does not have, or cannot say what it is."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import transformers
from conftest import llama
from peft import LoraConfig, PeftModel, get_peft_model

from conversion.architectures import ARCHITECTURES
from conversion.lora_tools import lora_config, lora_layers
from metis_hf import MetisConfig, get_metis_model, metis_layers

EXPERTS = "model.layers.0.mlp.experts"
FUSED = {
    "by PEFT's names of Mixtral": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    "as parameters": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "as modules": {"target_modules": ["q_proj", "gate_up_proj", "down_proj"]},
}


def mixtral(**options):
    return get_metis_model(ARCHITECTURES["mixtral"].build(), MetisConfig(scheme="bf16", **options))


@pytest.mark.parametrize("form", FUSED)
def test_fused_experts_of_a_converted_base(form):
    message = (
        rf"targets fused experts \(target_\w+: .*down_proj.*{EXPERTS}\.\w+\); PEFT would skip "
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


def sparse_and_dense():
    """A Qwen3-MoE whose first block is dense: its layers are called as experts once were."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=2, num_experts_per_tok=1, mlp_only_layers=[0], pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    return get_metis_model(model, MetisConfig(scheme="bf16"))


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all-linear", 15),
        (r".*layers\.0\..*_proj", 7),
        ([f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")], 3),
    ],
)
def test_layers_beside_fused_experts(targets, count, tmp_path):
    """PEFT would take those of the dense block for experts, and leave them out."""
    made = get_peft_model(sparse_and_dense(), LoraConfig(target_modules=targets))
    names = set(lora_layers(made))
    assert len(names) == count
    assert "model.layers.0.mlp.gate_proj" in names
    assert not made.peft_config["default"].target_parameters
    made.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(sparse_and_dense(), tmp_path)
    assert set(lora_layers(loaded)) == names


def test_an_adapter_of_layers_that_names_fused_experts_too():
    """As "all-linear" was saved when PEFT's names had been added."""
    config = LoraConfig(
        target_modules=["q_proj", f"{EXPERTS}.metis_down_proj.0"],
        target_parameters=["gate_up_proj", "down_proj"],
    )
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        model = get_peft_model(mixtral(), config)
    assert f"{EXPERTS}.metis_down_proj.0" in lora_layers(model)


def test_a_config_from_before_its_names_were_checked(tmp_path):
    """`exclude_modules=["mlp"]` left nothing out, and was no error."""
    made = get_peft_model(get_metis_model(llama(1)), LoraConfig(target_modules=["q_proj"]))
    made.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    config["metis_config"]["exclude_modules"] = ["mlp"]
    path.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="this base has been converted too"):
        loaded = PeftModel.from_pretrained(llama(1), tmp_path)
    assert len(dict(metis_layers(loaded))) == 7


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


def test_a_hostile_pattern_of_a_loaded_adapter_ends(tmp_path):
    """`re` would be busy with it for longer than anyone waits."""
    base = get_metis_model(llama(), MetisConfig(scheme="nvfp4-rne"))
    get_peft_model(base, lora_config(target_modules=["up_proj"])).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    hostile = json.loads(path.read_text()) | {"target_modules": "(([a-z_.0-9]+)+)+X"}
    path.write_text(json.dumps(hostile))
    with pytest.raises(ValueError, match=r"[Tt]arget"):
        PeftModel.from_pretrained(get_metis_model(llama(), MetisConfig(scheme="bf16")), tmp_path)
