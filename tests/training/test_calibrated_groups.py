"""Static scales of layers in several schemes, and of layers that PEFT keeps copies of."""

from __future__ import annotations

import peft
import pytest
import torch

from metis_hf import calibrate, freeze_scales, metis_layers
from training.test_calibration import converted, ids

QKV = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize("by", ["calibrate", "freeze_scales"])
def test_layers_deployed_together_in_two_schemes(by):
    """All share the weights' scale, and those that quantize inputs the inputs' too."""
    model = converted(scheme_pattern={"k_proj": "w4a16"})
    if by == "calibrate":
        found = calibrate(model, ids())
    else:
        model.train()(ids(1)[0])
        found = freeze_scales(model)
    layers = {name: layer for name, layer in metis_layers(model) if "layers.0.self_attn" in name}
    q, k, v = (next(name for name in layers if name.endswith(own)) for own in QKV)
    assert found[q].group == found[k].group == (q, k, v)
    largest = max(layers[name].weight.abs().max() for name in (q, k, v))
    assert all(layers[name].weight_amax == largest for name in (q, k, v))
    assert layers[q].input_amax == layers[v].input_amax > 0
    assert layers[k].input_amax == found[k].largest == 0
    assert all(layer.scales_frozen == 1 for layer in layers.values())


def adapted(*saved):
    config = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=list(saved))
    return peft.get_peft_model(converted(), config)


def copies_of(model, own):
    return {
        name.rpartition(".")[2]: layer
        for name, layer in metis_layers(model)
        if "layers.0" in name and f"{own}." in name
    }


@pytest.mark.parametrize("saved", ["k_proj", "mlp"])
def test_a_layer_that_waits_beside_its_copy_needs_no_input(saved):
    model = adapted(saved)
    found = calibrate(model, ids())
    assert len(found) == 14
    assert not any("original_module" in name for name in found)
    for _, layer in metis_layers(model):
        assert layer.scales_frozen == 1
    if saved == "k_proj":  # still deployed with the others
        (name,) = (n for n in found if "layers.0.self_attn.k_proj" in n)
        group = [member.split(".self_attn.")[1] for member in found[name].group]
        assert tuple(member.split(".")[0] for member in group) == QKV


def two_adapters():
    model = adapted("down_proj")
    config = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["down_proj"])
    model.add_adapter("b", config)
    return model


def test_a_copy_that_waits_gets_the_scales_of_the_one_that_runs():
    model = two_adapters()
    layers = copies_of(model, "down_proj")
    assert layers.keys() == {"original_module", "default", "b"}
    with torch.no_grad():
        layers["b"].weight.mul_(3)
    calibrate(model, ids())
    assert len({layer.input_amax.item() for layer in layers.values()}) == 1
    # Room for the weights of all.
    assert all(layer.weight_amax == layers["b"].weight.abs().max() for layer in layers.values())


@pytest.mark.parametrize(("way", "runs"), [("set_adapter", "b"), ("disable_adapter", "original")])
def test_what_runs_is_what_is_calibrated(way, runs):
    model = two_adapters()
    if way == "set_adapter":
        model.set_adapter("b")
        found = calibrate(model, ids())
    else:
        with model.disable_adapter():
            found = calibrate(model, ids())
    (name,) = (n for n in found if "layers.0.mlp.down_proj" in n)
    assert name.endswith({"b": "modules_to_save.b", "original": "original_module"}[runs])


def test_freezing_after_training_beside_a_copy():
    model = adapted("down_proj").train()
    model(input_ids=ids(1)[0])
    freeze_scales(model)
    layers = copies_of(model, "down_proj")
    assert layers["original_module"].input_amax == layers["default"].input_amax > 0
