"""The life of a model, for each registered scheme and each architecture of transformers.

Every architecture is converted, trained, saved and reloaded, generates, is copied, and turns dense.
What an architecture meets of a scheme is how it stores weights: those ways are crossed with the
architectures that differ most and take turns on the others; other schemes visit one.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
from collections import Counter

import design
import pytest
import torch
import transformers
from tensors import assert_same, relative_error
from training.trainer_tools import losses, trainer

from conversion.architectures import ARCHITECTURES, Architecture, tokens
from metis_hf import (
    MetisCallback,
    MetisConfig,
    MetisLinear,
    get_metis_model,
    metis_layers,
    scheme_names,
    set_precision,
    to_dense,
)

# One scheme for each way to store weights and state.
FORMS = ("nvfp4", "metis-paper", "omniquant", "svdquant")
OTHERS = [name for name in scheme_names() if name not in FORMS]
SPLIT = ("bf16-split", "metis-paper", "svdquant", "metis-released", "mean-released")
# One for each way in which architectures differ: plain, Conv1D, experts, two stacks, no decoder.
QUICK = ("llama", "gpt2", "mixtral", "t5", "bert-masked")

# u s vh + residual in fp32: its rounding, relative to the largest weight (2^-24 and some sums).
SPLIT_TOLERANCE = 1e-6
# What that makes of logits after two blocks, relative to the largest logit.
LOGIT_TOLERANCE = 1e-5
# A sum over at most LENGTH * 4 tokens in another order, in fp32, relative to the largest gradient.
ORDER_TOLERANCE = 1e-6


def parametrized(found, quick):
    slow = [pair for pair in found if pair not in quick]
    return pytest.mark.parametrize(("scheme", "name"), design.some_slow(found, slow))


def crossed(schemes, visiting):
    """All pairs with architectures that differ, other pairs by turns; or all in a full run.

    Quick are those of the first two such architectures, and each other one once.
    """
    if design.full():
        found = list(itertools.product((*schemes, *visiting), ARCHITECTURES))
    else:
        others = [name for name in ARCHITECTURES if name not in QUICK]
        found = [
            *itertools.product(schemes, QUICK),
            *zip(itertools.cycle(schemes), others),
            *zip(visiting, itertools.cycle(QUICK)),
        ]
    quick = [*itertools.product(schemes, QUICK[:2]), *zip(schemes, reversed(QUICK[2:]))]
    return parametrized(found, [*quick, ("metis-paper", "mixtral")])


def by_turns(*schemes):
    """(scheme, architecture) pairs: each architecture once, or all in a full run."""
    found = list(zip(itertools.cycle(schemes), ARCHITECTURES))
    if design.full():
        found = list(itertools.product(schemes, ARCHITECTURES))
    return parametrized(found, [pair for pair in found if pair[1] in QUICK[1:4]])


def build(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return ARCHITECTURES[name].build()


def converted(name: str, scheme: str) -> transformers.PreTrainedModel:
    return get_metis_model(build(name), MetisConfig(scheme=scheme))


def logits(model, architecture: Architecture) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**architecture.batch()).logits


def fused_name(name: str) -> str:
    """A parameter's name before conversion: those of an expert are a row of a fused one."""
    match = re.fullmatch(r"(.*)\.metis_(\w+)\.\d+\.(weight|bias)", name)
    if match is None:
        return name
    return f"{match[1]}.{match[2]}" + ("_bias" if match[3] == "bias" else "")


def original_name(layer: str) -> str:
    """Name of the parameter whose place a layer has taken."""
    return fused_name(f"{layer}.weight")


def check_report(model, scheme: str, name: str) -> None:
    """What is converted, what is not and why, and how much of the model that is."""
    architecture = ARCHITECTURES[name]
    shapes = {key: value.shape for key, value in build(name).named_parameters()}
    layers, report = dict(metis_layers(model)), model.metis_report
    parts = Counter(
        original_name(layer).removesuffix(".weight").rpartition(".")[2] for layer in layers
    )
    assert parts == architecture.converted
    assert report.skipped == architecture.skipped
    assert {layer.name for layer in report.layers} == {key.replace("metis_", "") for key in layers}
    taken = {original_name(layer) for layer in layers}
    expected = sum(shapes[key].numel() for key in taken)
    assert report.converted_params == expected
    assert report.total_params == sum(shape.numel() for shape in shapes.values())
    assert expected / report.total_params >= architecture.share
    assert 0 < report.flops_share < 1  # the head is left out
    split = scheme in SPLIT
    assert all(isinstance(layer, MetisLinear) is split for layer in layers.values())
    assert all(layer.error <= SPLIT_TOLERANCE for layer in report.layers)
    text = str(report)
    assert f"scheme {scheme}: {len(layers)} layers converted" in text
    assert all(reason in text for reason in architecture.skipped.values())


def check_gradients(model, architecture: Architecture) -> None:
    """Every parameter gets a finite gradient, but for experts that no token visits."""
    model.train()
    model(**architecture.batch()).loss.backward()
    for layer_name, layer in metis_layers(model):
        gradients = [param.grad for param in layer.weight_params() if param.is_leaf]
        gradients = gradients or [layer.weight.grad]  # a Conv1D's weight is transposed on the way
        visited = gradients[-1] is not None
        assert visited or "experts" in layer_name, layer_name
        assert all((grad is not None) is visited for grad in gradients), layer_name
        if visited:
            assert all(grad.abs().max() > 0 for grad in gradients), layer_name
    for key, param in model.named_parameters():
        if param.grad is None:
            assert "experts" in key, key
        else:
            assert bool(torch.isfinite(param.grad).all()), key


def check_reload(model, architecture: Architecture, directory) -> None:
    """Saved and loaded again: the same parameters and logits, bit for bit, nothing left over."""
    expected = logits(model, architecture)
    model.save_pretrained(directory)
    loaded, info = architecture.auto.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = loaded.state_dict()
    assert list(state) == list(model.state_dict())
    assert_same(loaded, model)
    assert torch.equal(logits(loaded, architecture), expected)
    assert loaded.config.quantization_config == model.config.quantization_config
    configs = {key: layer.config for key, layer in metis_layers(model)}
    assert {key: layer.config for key, layer in metis_layers(loaded)} == configs
    assert not getattr(loaded, "is_quantized", False)


@crossed(FORMS, visiting=OTHERS)
def test_conversion_gradients_and_reload(scheme, name, tmp_path):
    model = converted(name, scheme)
    check_report(model, scheme, name)
    check_gradients(model, ARCHITECTURES[name])
    check_reload(model, ARCHITECTURES[name], tmp_path)


@by_turns("bf16", "nvidia", "metis")
def test_trainer(scheme, name, tmp_path):
    """Two steps of the stock Trainer, with the callback: finite losses, every layer moves."""
    architecture, model = ARCHITECTURES[name], converted(name, scheme)
    before = {key: layer.weight.detach().clone() for key, layer in metis_layers(model)}
    batch = architecture.batch()
    rows = [{key: value[index] for key, value in batch.items()} for index in (0, 1, 2, 3)] * 2
    callback = MetisCallback(health_interval=2 if scheme == "metis" else 0)
    options = {"max_steps": 2, "per_device_train_batch_size": 4}
    made = trainer(tmp_path, model, [callback], data=rows, **options)
    made.train()
    assert len(losses(made)) == 2
    assert torch.isfinite(torch.tensor(losses(made))).all()
    if scheme == "metis":
        assert made.state.log_history[0]["metis/nonfinite_tensors"] == 0
    moved = {
        key for key, layer in metis_layers(model) if not torch.equal(layer.weight, before[key])
    }
    assert {key for key in before if "experts" not in key} <= moved
    assert any("experts" in key for key in moved) is architecture.mixture


@by_turns("bf16", "metis-paper", "nvidia")
def test_to_dense(scheme, name, tmp_path):
    """A plain model with the represented weights; its checkpoint needs nothing of this package."""
    architecture, original = ARCHITECTURES[name], build(name)
    model = converted(name, scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model(**architecture.batch()).loss.backward()
    optimizer.step()
    represented = {}
    for key, layer in metis_layers(model):
        weight = layer.weight_form.dense(layer.weight_params()).detach()
        represented.setdefault(original_name(key), []).append(
            (weight.T if layer.conv1d else weight).clone()
        )
    set_precision(model, high_precision=("forward", "backward"))
    exact = logits(model, architecture)

    dense = to_dense(model)
    assert dense is model
    assert not any(module.training for module in dense.modules())  # as the model was
    assert [type(module) for module in dense.modules()] == [
        type(module) for module in original.modules()
    ]
    state = dense.state_dict()
    assert list(state) == list(original.state_dict())
    for key, weights in represented.items():
        expected = weights[0] if state[key].dim() == 2 else torch.stack(weights)
        assert torch.equal(state[key], expected), key
    outputs = logits(dense, architecture)
    bitwise = scheme not in SPLIT and not architecture.mixture
    assert relative_error(outputs, exact) <= (0 if bitwise else LOGIT_TOLERANCE)

    dense.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    plain, info = architecture.auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not list(metis_layers(plain))
    assert torch.equal(logits(plain, architecture), outputs)


def check_generation(model) -> None:
    """Greedy decoding with a cache: the same twice, of the length asked for."""
    prompt = tokens(rows=2)[:, :6]
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    mask = torch.ones_like(prompt)
    first = model.generate(prompt, attention_mask=mask, **options)
    start = 1 if model.config.is_encoder_decoder else prompt.shape[1]
    assert first.shape == (2, start + 3)
    assert torch.equal(model.generate(prompt, attention_mask=mask, **options), first)


@by_turns("nvidia", "metis-paper", "metis")
def test_copies_and_generation(scheme, name):
    """Copies compute the same and share nothing with the original, mask of the batch included."""
    architecture, model = ARCHITECTURES[name], converted(name, scheme)
    expected = logits(model, architecture)
    storage = {param.data_ptr() for param in model.parameters()}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, architecture), expected)
        assert storage.isdisjoint(param.data_ptr() for param in twin.parameters())
        masks = {id(layer.token_mask) for _, layer in metis_layers(model)}
        assert masks.isdisjoint(id(layer.token_mask) for _, layer in metis_layers(twin))
    if architecture.generates:
        check_generation(model)


@by_turns("bf16")
def test_bf16_is_the_unconverted_model(scheme, name):
    """Logits and gradients, bit for bit.

    Experts are compared with transformers' plain loop over experts ("eager"). A token visits two of
    them here, and a sum of two does not depend on the order; from three on it would, in the last
    bit. Only the gradients of the experts' own parameters agree to rounding: the loop takes an
    expert's tokens by choice first, ours by position, and the sum over tokens has that order.
    """
    architecture, original = ARCHITECTURES[name], build(name)
    if architecture.mixture:
        original.set_experts_implementation("eager")
    model = converted(name, scheme)
    outputs = []
    for each in (original, model):
        output = each.train()(**architecture.batch())
        output.loss.backward()
        outputs.append(output.logits.detach())
    assert torch.equal(*outputs)
    gradients: dict[str, list[torch.Tensor]] = {}
    for key, param in model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        gradients.setdefault(fused_name(key), []).append(grad)
    for key, param in original.named_parameters():
        mine = gradients.pop(key)
        value = mine[0] if mine[0].dim() == param.dim() else torch.stack(mine)
        if ".experts." in key:
            assert relative_error(value, param.grad) <= ORDER_TOLERANCE, key
        else:
            assert torch.equal(value, param.grad), key
    assert not gradients
