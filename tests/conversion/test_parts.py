"""Conversion of a part of a model, whose owner's config does not know of it."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import llama, t5
from torch import nn

from metis_hf import MetisConfig, get_metis_model, to_dense
from metis_hf.conversion import parts


def llava():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
             "num_attention_heads": 4, "vocab_size": 64}  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(**sizes),
    )
    with torch.device("meta"):
        return transformers.LlavaForConditionalGeneration(config)


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(parts.logger, "warning_once", lambda text, *args: found.append(text % args))
    return found


def test_saving_the_owner_warns(warnings, tmp_path):
    model = llama()
    get_metis_model(model.model, MetisConfig(scheme="nvfp4"))
    model.save_pretrained(tmp_path)
    assert len(warnings) == 1
    assert warnings[0].startswith("model is converted, but its owner's config does not say so")


@pytest.mark.parametrize(
    ("kind", "part"),
    [("T5", "encoder"), ("Llava", "model.vision_tower"), ("Llama", "model.layers")],
)
def test_every_part_warns(kind, part, warnings):
    """Whatever the name of its base, and whether it is a model of its own."""
    whole = {"T5": t5, "Llava": llava, "Llama": llama}[kind]()
    get_metis_model(whole.get_submodule(part), MetisConfig(scheme="bf16"))
    whole.state_dict()
    assert [text.split()[0] for text in warnings] == [part]


def test_wrappers_of_the_whole_do_not_warn(warnings):
    model = get_metis_model(llama(1), MetisConfig(scheme="bf16"))
    for wrapper in ("module", "_orig_mod", "_fsdp_wrapped_module", "base_model.model"):
        wrapped = model
        for name in reversed(wrapper.split(".")):
            wrapped = nn.ModuleDict({name: wrapped})
        nn.ModuleDict({"module": wrapped}).state_dict()
        assert warnings == [], wrapper


def test_parts_that_were_converted_one_by_one(warnings):
    with torch.device("meta"):
        model = t5()
    before = {name: type(module) for name, module in model.named_modules()}
    for part in (model.encoder, model.decoder):
        get_metis_model(part, MetisConfig(scheme="nvfp4"))
    assert to_dense(model) is model
    assert {name: type(module) for name, module in model.named_modules()} == before
    model.state_dict()
    assert warnings == []
    for part in (model, model.encoder, model.decoder):
        assert not hasattr(part, "metis_report")
        assert not hasattr(part.config, "quantization_config")
        assert not part._forward_pre_hooks
        assert not part._forward_hooks


def test_nothing_else_warns(warnings, tmp_path):
    part = get_metis_model(llama().model, MetisConfig(scheme="nvfp4"))
    part.save_pretrained(tmp_path / "part")
    nn.ModuleDict({"module": part}).state_dict()  # DDP's name
    get_metis_model(llama(), MetisConfig(scheme="nvfp4")).save_pretrained(tmp_path / "whole")
    owner = llama()
    get_metis_model(owner.model, MetisConfig(scheme="nvfp4"))
    to_dense(owner)
    owner.save_pretrained(tmp_path / "dense")
    assert warnings == []
