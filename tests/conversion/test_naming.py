"""A checkpoint converts the same layers, whichever class of its architecture loads it."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import llama

from metis_hf import MetisConfig, get_metis_model, metis_layers

# Written for the names in LlamaForCausalLM, and the same for those in LlamaModel.
FORMS = [
    {"exclude_modules": r"{0}layers\.0\..*"},
    {"modules_to_not_convert": ["{0}layers.0"]},
    {"target_modules": ["{0}layers.1.mlp.up_proj", "q_proj"]},
    {"scheme_pattern": {r"{0}layers\.0\..*": "bf16"}},
    {"split_weight": True, "rank": 4, "rank_pattern": {r"{0}layers\.0\..*": 8}},
]


def named(value, prefix):
    if isinstance(value, dict):
        return {key.replace("{0}", prefix): each for key, each in value.items()}
    if isinstance(value, list):
        return [each.replace("{0}", prefix) for each in value]
    return value.replace("{0}", prefix.replace(".", r"\.")) if isinstance(value, str) else value


def config(form, prefix):
    options = {key: named(value, prefix) for key, value in form.items()}
    return MetisConfig(**{"scheme": "nvfp4", **options})


def layers(model):
    return {
        name.removeprefix("model."): (layer.config.scheme, layer.rank)
        for name, layer in metis_layers(model)
    }


def hidden(model, ids):
    with torch.no_grad():
        return model.eval()(ids).last_hidden_state


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_saved_with_a_head(form, tmp_path, token_ids):
    """Loaded without it, saved as such, and loaded again; the noise follows from the names."""
    model = get_metis_model(llama(), config(form, "model."))
    model.save_pretrained(tmp_path / "head")
    base = transformers.AutoModel.from_pretrained(tmp_path / "head")
    assert layers(base) == layers(model)
    assert torch.equal(hidden(base, token_ids), hidden(model.model, token_ids))
    keys = [layer.key for _, layer in metis_layers(model)]
    assert [layer.key for _, layer in metis_layers(base)] == keys
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert layers(again) == layers(model)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_saved_without_a_head(form, tmp_path, token_ids):
    base = get_metis_model(llama().model, config(form, ""))
    base.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert layers(model) == layers(base)
    assert torch.equal(hidden(model.model, token_ids), hidden(base, token_ids))


def test_same_class_has_its_own_names(tmp_path):
    """A pattern is not tried on other names where it means something on the model's."""
    options = {"target_modules": r"model\.layers\.1\..*|layers\.0\..*"}
    model = get_metis_model(llama(), MetisConfig(scheme="nvfp4", **options))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert layers(again) == layers(model)
    assert {name.split(".")[1] for name in layers(again)} == {"1"}
