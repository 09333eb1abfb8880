"""LoRA over a frozen converted model, held to PEFT's own LoRA on the dense model."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, VOCAB, gpt2, llama, mixtral
from design import cases
from layers.layer_tools import of_each_kind
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraModel
from tensors import assert_same, logits
from training.trainer_tools import records, trainer

from conversion.lora_tools import adapted, base_state, is_transposed, lora_config, lora_layers
from metis_hf import (
    MetisCallback,
    MetisConfig,
    get_metis_model,
    high_precision,
    metis_layers,
    refresh,
    scheme_names,
    to_dense,
)
from metis_hf.conversion.lora import MetisLoraModel

# W + BA and back is a handful of fp32 additions; relative to the largest weight.
FP32_SUM = 4 * torch.finfo(torch.float32).eps
# fp32 rounding of the merged product over two layers, relative to the largest logit.
MERGED_LOGITS = 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_unquantized_equals_peft_on_the_plain_model(architecture, token_ids):
    """Scheme bf16, same A and B: PEFT's logits and its gradients, bit for bit."""
    plain = ARCHITECTURES[architecture]()
    converted = get_metis_model(copy.deepcopy(plain), MetisConfig(scheme="bf16"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        theirs = get_peft_model(plain, lora_config())
    ours = get_peft_model(converted, lora_config())
    assert len(lora_layers(ours)) == len(dict(metis_layers(converted)))
    adapters = {k: v for k, v in theirs.state_dict().items() if "lora_" in k}
    assert adapters.keys() == {k for k in ours.state_dict() if "lora_" in k}
    ours.load_state_dict(adapters, strict=False)
    assert torch.equal(logits(ours, token_ids), logits(theirs, token_ids))

    for model in (ours, theirs):
        model.train()
        model(input_ids=token_ids, labels=token_ids).loss.backward()
    grads = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        if "lora_" in name:
            assert torch.equal(param.grad, grads[name].grad), name
        else:
            assert param.grad is None


@pytest.mark.parametrize("scheme", of_each_kind(scheme_names()))
def test_forward_and_backward_are_the_frozen_layer_plus_the_branch(scheme):
    model, _ = adapted(llama(), scheme)
    layer = lora_layers(model)["model.layers.0.mlp.up_proj"].train()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    # Between torch's autograd and the equations: fp32 sums of at most 96 terms in another order.
    tolerance = {"rtol": 0, "atol": 96 * torch.finfo(torch.float32).eps}
    x = torch.randn(2, 20, 64, requires_grad=True)
    dy = torch.randn(2, 20, 96)
    y = layer(x)
    y.backward(dy)
    got = x.grad.clone()
    x.grad = None
    base = layer.base(x)
    base.backward(dy)
    torch.testing.assert_close(y, base + x @ a.T @ b.T * 2, **tolerance)
    torch.testing.assert_close(got, x.grad + dy @ b @ a * 2, **tolerance)
    xs, dys = x.detach().reshape(-1, 64), dy.reshape(-1, 96)
    for param, expected in ((a, (dys @ b).T @ xs * 2), (b, dys.T @ (xs @ a.T) * 2)):
        scale = expected.abs().max()
        torch.testing.assert_close(param.grad / scale, expected / scale, **tolerance)
    for name, param in layer.base.named_parameters():
        assert param.grad is None, name
        assert not param.requires_grad


def test_trainer_trains_the_adapter_and_nothing_else(tmp_path):
    model, _ = adapted(llama(), "metis-paper", init_lora_weights=True)
    before, start = base_state(model), copy.deepcopy(model.state_dict())
    ids = torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = {"learning_rate": 1e-2, "per_device_train_batch_size": 4}
    made = trainer(tmp_path, model, [MetisCallback(health_interval=4)], data=data, **options)
    made.train()
    history = records(made)
    assert history[-1]["loss"] < history[0]["loss"]
    assert "metis/weight/sqnr_db" in history[0]
    assert_same(base_state(model), before)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, start[k])}
    assert changed == {k for k in start if "lora_" in k}


@pytest.mark.parametrize(("architecture", "scheme"), [("llama", "nvidia"), ("gpt2", "metis")])
def test_save_and_load_the_adapter(architecture, scheme, token_ids, tmp_path):
    base = ARCHITECTURES[architecture]()
    model, _ = adapted(copy.deepcopy(base), scheme)
    expected = logits(model, token_ids)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    fresh = get_metis_model(base, MetisConfig(scheme=scheme))
    loaded = PeftModel.from_pretrained(fresh, tmp_path)
    assert torch.equal(logits(loaded, token_ids), expected)
    assert not any(param.requires_grad for param in loaded.parameters())
    trainable = PeftModel.from_pretrained(loaded.unload(), tmp_path, is_trainable=True)
    assert {n for n, p in trainable.named_parameters() if p.requires_grad} == {
        n for n, _ in trainable.named_parameters() if "lora_" in n
    }


@cases(
    {"scheme": ["nvidia", "bf16-split", "metis-paper"]},
    rotated={"architecture": ["llama", "gpt2"]},
)
def test_merge_and_unload_represents_w_plus_ba(architecture, scheme, token_ids, tmp_path):
    model, expected = adapted(ARCHITECTURES[architecture](), scheme)
    merged = model.merge_and_unload(safe_merge=True)
    layers = dict(metis_layers(merged))
    assert layers.keys() == expected.keys()
    for name, layer in layers.items():
        weight = (layer.weight.T if is_transposed(layer) else layer.weight).double()
        bound = FP32_SUM * expected[name].abs().max()
        assert (weight - expected[name]).abs().max() <= bound, name
    # A Metis model like any other: it saves, loads, and turns dense.
    quantized = logits(merged, token_ids)
    merged.save_pretrained(tmp_path)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(reloaded, token_ids), quantized)
    dense = to_dense(merged)
    for name, w in expected.items():
        weight = dense.get_submodule(name).weight
        weight = weight.T if architecture == "gpt2" else weight
        assert (weight - w).abs().max() <= FP32_SUM * w.abs().max()


def test_refresh_after_a_merge_decomposes_the_sum(token_ids):
    """The merged delta lies in the residual until the weight is decomposed again."""
    model, expected = adapted(llama(), "metis", split=True)
    merged = model.merge_and_unload()
    layer = dict(metis_layers(merged))["model.layers.0.mlp.up_proj"]
    before = torch.linalg.matrix_norm(layer.weight_residual, 2)
    assert max(refresh(merged).values()) < 1e-6
    after = torch.linalg.matrix_norm(layer.weight_residual, 2)
    w = expected["model.layers.0.mlp.up_proj"]
    # The residual's norm is the first singular value that the rank leaves out (a randomized
    # decomposition finds it to a few percent).
    first_left = torch.linalg.svdvals(w)[layer.rank]
    assert before > 1.5 * first_left
    assert after < 1.1 * first_left


@pytest.mark.parametrize(
    ("make", "scheme", "split", "rslora"),
    [(gpt2, "nvidia", None, False), (llama, "metis", None, True), (gpt2, "metis", True, False)],
)
def test_merge_and_unmerge(make, scheme, split, rslora):
    model, expected = adapted(make(), scheme, split=split, use_rslora=rslora)
    before = base_state(model)
    model.merge_adapter()
    name, layer = next(iter(lora_layers(model).items()))
    assert layer.scaling["default"] == (4 if rslora else 2)  # alpha 8, rank 4: 8 / sqrt(4), 8 / 4
    w = layer.base.weight.T if is_transposed(layer.base) else layer.base.weight
    assert (w - expected[name]).abs().max() <= FP32_SUM * expected[name].abs().max()
    model.unmerge_adapter()
    for key, value in base_state(model).items():
        bound = FP32_SUM * max(w.abs().max() for w in expected.values())
        assert (value - before[key]).abs().max() <= bound, key


def test_several_adapters_and_none(token_ids):
    model = llama()
    plain = logits(get_metis_model(model, MetisConfig()), token_ids)
    model = get_peft_model(model, lora_config())
    first = logits(model, token_ids)
    model.add_adapter("second", lora_config(r=2, target_modules=["q_proj", "up_proj"]))
    model.set_adapter("second")
    second = logits(model, token_ids)
    assert len({tuple(x.flatten().tolist()) for x in (plain, first, second)}) == 3
    model.set_adapter("default")
    assert torch.equal(logits(model, token_ids), first)
    with model.disable_adapter():
        assert torch.equal(logits(model, token_ids), plain)
    names = ["default", "second"]
    # One row each; under the activation split a row depends on its batch.
    with high_precision(model), torch.no_grad():
        mixed = model(input_ids=token_ids, adapter_names=names).logits
        for row, name in enumerate(names):
            model.set_adapter(name)
            alone = logits(model, token_ids)
            error = (mixed - alone).abs().amax(dim=(1, 2)) / alone.abs().max()
            assert error[row] <= MERGED_LOGITS
            assert error[1 - row] > 0.01
    model.delete_adapter("second")
    assert torch.equal(logits(model.unload(), token_ids), plain)


def test_second_adapter_on_all_linear(token_ids):
    """The layers are found again although the first adapter wraps them."""
    model, _ = adapted(llama())
    model.add_adapter("second", lora_config())
    assert model.peft_config["second"].target_modules == model.peft_config["default"].target_modules
    assert all(set(layer.lora_A) == {"default", "second"} for layer in lora_layers(model).values())


def test_all_linear_leaves_the_head_and_takes_unconverted_layers():
    config = MetisConfig(target_modules=["q_proj", "lm_head"])
    model = get_peft_model(get_metis_model(llama(), config), lora_config())
    targets = model.peft_config["default"].target_modules
    assert "lm_head" not in targets
    assert len(targets) == 14
    assert len(lora_layers(model)) == 2  # the others are PEFT's own, on plain layers


@pytest.mark.parametrize("targets", ["all-linear", r".*\.experts\.metis_\w+\.\d+"])
def test_experts_take_adapters_too(targets, token_ids, tmp_path):
    base = get_metis_model(mixtral(4, num_experts_per_tok=2), MetisConfig(scheme="nvidia"))
    model = get_peft_model(base, lora_config(target_modules=targets))
    assert sum(".experts." in name for name in lora_layers(model)) == 8
    assert (len(lora_layers(model)) == 12) == (targets == "all-linear")
    model.train()
    mask = torch.ones_like(token_ids)
    model(input_ids=token_ids, attention_mask=mask, labels=token_ids).loss.backward()
    grads = {n for n, p in model.named_parameters() if p.grad is not None}
    assert grads
    assert all("lora_" in name for name in grads)
    assert any(".experts." in name for name in grads)
    expected = logits(model, token_ids)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model.unload(), tmp_path)
    assert torch.equal(logits(loaded, token_ids), expected)


def test_bf16_autocast_and_dropout():
    model, _ = adapted(llama(), lora_dropout=0.5)
    ids = torch.randint(0, VOCAB, (2, 20))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [p.grad for n, p in model.named_parameters() if "lora_" in n]
    assert all(grad is not None and grad.dtype is torch.float32 for grad in grads)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)


def test_plain_models_keep_pefts_own_layers():
    assert PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] is MetisLoraModel
    assert issubclass(MetisLoraModel, LoraModel)
    model = get_peft_model(llama(), lora_config())
    assert not lora_layers(model)


def test_lora_bias_is_merged_too_and_taken_out_again(token_ids):
    model, _ = adapted(gpt2(), "bf16", lora_bias=True)
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].bias)
    beside, before = logits(model, token_ids), base_state(model)
    biases = [key for key in before if key.endswith("base_layer.bias")]
    model.merge_adapter()
    assert (logits(model, token_ids) - beside).abs().max() <= MERGED_LOGITS * beside.abs().max()
    assert min((base_state(model)[key] - before[key]).abs().max() for key in biases) > 0.1
    model.unmerge_adapter()
    for key in biases:
        torch.testing.assert_close(base_state(model)[key], before[key], rtol=0, atol=1e-5)


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"use_dora": True}, r"DoraLinearVariant is not supported over a Metis layer"),
            ({"init_lora_weights": "pissa"}, r"'pissa' rewrites the base weight.*'gaussian'"),
        ],
    )
    def test_variants_that_need_the_dense_weight(self, changes, match):
        with pytest.raises(ValueError, match=match):
            adapted(llama(), **changes)

    def test_broken_adapter_is_not_merged(self):
        model, _ = adapted(llama())
        layer = next(iter(lora_layers(model).values()))
        before = base_state(model)
        layer.lora_B["default"].weight.data[0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"'default' has NaN or inf; nothing was merged"):
            model.merge_adapter(safe_merge=True)
        assert_same(base_state(model), before)

    def test_bias_without_a_place(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = adapted(llama(), lora_bias=True)
        with pytest.raises(ValueError, match=r"has a bias .*that cannot be merged.*no bias"):
            model.merge_adapter()


@pytest.mark.parametrize("form", ["added", "base of a PeftModel", "inside"])
def test_converting_around_adapters_is_refused(form):
    """The adapters' own linear layers would be quantized."""
    model, config = llama(1), LoraConfig(r=4, target_modules=["q_proj"])
    if form == "added":
        model.add_adapter(config)
    elif form == "inside":
        model = torch.nn.Sequential(get_peft_model(model, config))
    else:
        model = get_peft_model(model, config).get_base_model()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(
        ValueError, match=r"already has PEFT adapters \((0|.*q_proj) is PEFT's .*add"
    ):
        get_metis_model(model)
    assert [name for name, _ in model.named_modules()] == names
