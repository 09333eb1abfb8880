"""Weights in evaluation: quantized once, with the bits of quantizing each time, never stale."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conftest import VOCAB, llama
from design import cases
from torch import nn

from layers.layer_tools import FP4_STRUCTURES, layer_of
from metis_hf import MetisConfig, calibrate, get_metis_model, metis_layers
from metis_hf.layers import linear

SPLIT = {"split_weight": True}
CASES = [("nvfp4-rne", {}), ("metis", {}), ("metis", SPLIT), ("omniquant", {})]


def evaluated(scheme, **options):
    return layer_of(scheme, i=64, o=48, **options)[1].eval()


@torch.no_grad()
def call(layer, x):
    return layer(x)


@torch.no_grad()
def fresh(layer, x):
    """What the layer gives if it has held nothing."""
    return copy.deepcopy(layer)(x)


@pytest.fixture
def x():
    return torch.randn(3, 64)


# The dtype is that of what is made of the codes.
@cases({"scheme, mode": FP4_STRUCTURES}, rotated={"autocast": [False, True]})
def test_holding_changes_no_bit(scheme, mode, autocast):
    layer = layer_of(scheme, mode, i=64, o=48)[1].eval()
    for rows in (40, 1, 1):  # a prompt and two tokens
        x = torch.randn(rows, 64)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(call(layer, x), fresh(layer, x))
    of_the_call = layer.scheme.fprop_weight.conditioner.needs_state  # its scales
    assert len(layer.evaluation_weight) == (not of_the_call)


def frozen(**options):
    """A layer whose static scales are fixed, those of the weight above its own amax."""
    layer = evaluated("w4a4", **options)
    layer.input_amax.fill_(2.0)
    layer.weight_amax.fill_(1.5 * layer.weight.detach().abs().max())
    layer.scales_frozen.fill_(1)
    return layer


SCALES = {
    "another amax": lambda layer: layer.weight_amax.mul_(3),
    "not fixed any more": lambda layer: layer.scales_frozen.zero_(),
    "another buffer": lambda layer: setattr(layer, "weight_amax", layer.weight_amax * 3),
    "load_state_dict, assign": lambda layer: layer.load_state_dict(
        {**layer.state_dict(), "weight_amax": layer.weight_amax * 3}, assign=True
    ),
}


@pytest.mark.parametrize("change", SCALES)
def test_another_static_scale_is_taken(change, x):
    layer = frozen()
    for _ in range(3):
        before = call(layer, x)
        assert torch.equal(before, fresh(layer, x))
    assert len(layer.evaluation_weight) == 1
    SCALES[change](layer)
    for _ in range(3):
        after = call(layer, x)
        assert torch.equal(after, fresh(layer, x))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_a_weight_is_quantized_once(no_gradients, x, monkeypatch):
    layer = evaluated("metis")
    quantized = []
    form = type(layer.weight_form)
    for name in ("quantize", "encode"):
        original = getattr(form, name)

        def spy(self, *args, original=original, name=name, **kwargs):
            quantized.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(form, name, spy)
    with no_gradients():
        for _ in range(4):
            layer(x)
    assert quantized == ["quantize", "encode"]  # what is called once is not held


def optimizer_step(optimizer):
    """A change by an optimizer, without a forward pass of the layer."""

    def change(layer):
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        optimizer(layer.parameters()).step()
        layer.zero_grad()

    return change


def in_place(layer):
    with torch.no_grad():
        layer.weight_params()[-1].mul_(1.5)


def in_inference_mode(layer):
    with torch.inference_mode():
        layer.weight_params()[-1].mul_(1.5)


def assign_data(layer):
    for param in layer.parameters():
        param.data = param.data * 1.5


def data_in_place(layer):
    for param in layer.parameters():
        param.data.mul_(1.5)


def load(assign):
    def change(layer):
        changed = {name: value * 1.5 for name, value in layer.state_dict().items()}
        layer.load_state_dict(changed, assign=assign)

    return change


CHANGES = {
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "data": assign_data,
    "data in place": data_in_place,
    "load_state_dict": load(False),
    "load_state_dict, assign": load(True),
    "SGD": optimizer_step(lambda params: torch.optim.SGD(params, lr=0.1)),
    "AdamW": optimizer_step(lambda params: torch.optim.AdamW(params, lr=0.01)),
    "fused AdamW": optimizer_step(lambda params: torch.optim.AdamW(params, lr=0.01, fused=True)),
    "dtype": lambda layer: layer.to(torch.bfloat16).to(torch.float32),
    "config": lambda layer: layer.set_config(layer.config.replace(two_level=False)),
}


@pytest.mark.filterwarnings("ignore:two_level=False")
@cases({"change": list(CHANGES)}, rotated={"scheme, options": CASES})
def test_a_changed_weight_is_quantized_again(scheme, options, change, x):
    layer = evaluated(scheme, **options)
    before = [call(layer, x) for _ in range(3)][-1]
    assert len(layer.evaluation_weight) == 1
    for _ in range(2):
        CHANGES[change](layer)
        for _ in range(3):
            assert torch.equal(call(layer, x), fresh(layer, x))
        assert len(layer.evaluation_weight) == 1
    assert not torch.equal(call(layer, x), before)


@pytest.mark.parametrize("change", ["train", "gradients", "to", "double"])
def test_given_back(change, x):
    layer = evaluated("metis")
    call(layer, x)
    call(layer, x)
    assert len(layer.evaluation_weight) == 1
    {
        "train": lambda: layer.train(),
        "gradients": lambda: layer(x),
        "to": lambda: layer.to(torch.bfloat16),
        "double": lambda: layer.double(),
    }[change]()
    assert layer.evaluation_weight.is_empty


def frozen_in_inference_mode(layer):
    with torch.inference_mode():
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


def as_replica(layer):
    weight = layer.weight.detach().clone()
    layer._parameters = {}
    layer.weight = weight


NOT_HELD = {
    "gradients": lambda layer: None,
    "training": lambda layer: layer.train(),
    "FSDP2": lambda layer: setattr(layer, "_is_fsdp_managed_module", True),
    "ZeRO-3": lambda layer: setattr(layer.weight, "ds_id", 0),
    "ZeRO-1": lambda layer: setattr(layer.weight, "_hp_mapping", None),
    "inference tensors": frozen_in_inference_mode,
    "replica": as_replica,
}


@pytest.mark.parametrize("case", NOT_HELD)
def test_not_held(case, x):
    layer = evaluated("nvfp4-rne", bias=False)
    NOT_HELD[case](layer)
    for _ in range(3):
        with torch.set_grad_enabled(case == "gradients"):
            layer(x)
    assert layer.evaluation_weight.is_empty


def test_not_held_inside_torch_compile(x):
    layer = evaluated("nvfp4-rne")
    with torch.no_grad():
        expected = layer(x)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
    assert len(layer.evaluation_weight) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_holds_nothing(copied, x):
    layer = evaluated("metis")
    call(layer, x)
    expected = call(layer, x)
    other = copied(layer)
    assert len(layer.evaluation_weight) == 1
    assert other.evaluation_weight.is_empty
    assert torch.equal(call(other, x), expected)


@pytest.mark.parametrize("scheme", ["metis", "w4a4"])
def test_generation(scheme, monkeypatch):
    """The tokens of a model that quantizes its weights for each of them."""
    model = get_metis_model(llama(), MetisConfig(scheme=scheme)).eval()
    if scheme == "w4a4":
        calibrate(model, [torch.randint(0, VOCAB, (2, 24))])
    prompt = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options["return_dict_in_generate"] = True
    held = model.generate(prompt, **options)
    assert all(len(layer.evaluation_weight) == 1 for _, layer in metis_layers(model))
    model.train().eval()
    with monkeypatch.context() as patched:
        patched.setattr(linear, "can_keep_in_evaluation", lambda layer: False)
        plain = model.generate(prompt, **options)
    assert all(len(layer.evaluation_weight) == 0 for _, layer in metis_layers(model))
    assert torch.equal(held.sequences, plain.sequences)
    assert all(map(torch.equal, held.logits, plain.logits))
