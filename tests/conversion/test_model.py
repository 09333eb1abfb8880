"""Conversion of real transformers models: what is converted, saved, loaded and turned back."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, llama
from design import cases
from layers.layer_tools import of_each_kind
from torch import nn

from metis_hf import (
    MetisConfig,
    MetisLinear,
    QuantLinear,
    get_metis_model,
    metis_layers,
    register_scheme,
    scheme_names,
    to_dense,
)
from metis_hf.schemes import Scheme, registry
from metis_hf.training.refresh import refresh_layer

# fp32 rounding of u s vh + residual, relative to the largest logit.
DENSE_TOLERANCE = 1e-5


def logits(model, ids):
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


def train_steps(model, ids, steps=5):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# test_architectures takes every scheme through conversion, gradients, saving and loading.
@cases({"scheme": of_each_kind(scheme_names())}, rotated={"architecture": list(ARCHITECTURES)})
def test_convert_train_save_reload_dense(scheme, architecture, token_ids, tmp_path):
    """The life of a model, for each kind of scheme."""
    model = ARCHITECTURES[architecture]()
    original = copy.deepcopy(model)
    assert get_metis_model(model, MetisConfig(scheme=scheme)) is model
    layers = dict(metis_layers(model))
    assert len(layers) == {"llama": 14, "qwen2": 14, "gpt2": 8}[architecture]
    assert "lm_head" not in layers
    assert "lm_head" in model.metis_report.skipped

    dense = to_dense(copy.deepcopy(model))
    assert type(dense.get_submodule(next(iter(layers)))) is type(
        original.get_submodule(next(iter(layers)))
    )
    assert dense.state_dict().keys() == original.state_dict().keys()
    for name, value in original.state_dict().items():
        torch.testing.assert_close(dense.state_dict()[name], value, rtol=0, atol=1e-6)

    losses = train_steps(model, token_ids)
    assert losses[-1] < losses[0]

    expected = logits(model, token_ids)
    model.save_pretrained(tmp_path)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(reloaded, token_ids), expected)
    state = reloaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert next(metis_layers(reloaded))[1].config == MetisConfig(scheme=scheme)
    # An ordinary trainable model again, and it saves again.
    assert not getattr(reloaded, "is_quantized", False)
    assert not hasattr(reloaded, "hf_quantizer")
    train_steps(reloaded, token_ids, steps=1)
    reloaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["quantization_config"][
        "scheme"
    ] == (scheme)

    dense = to_dense(copy.deepcopy(model))
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert not list(metis_layers(plain))
    for name, layer in metis_layers(model):
        weight = plain.get_submodule(name).weight
        represented = layer.weight.T if layer.conv1d and isinstance(layer, MetisLinear) else None
        expected_weight = layer.weight if represented is None else represented
        torch.testing.assert_close(weight, expected_weight, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_plain_install_cannot_mistake_a_split_checkpoint(tmp_path):
    """Without metis_hf, loading reports missing weights instead of a plausible wrong model."""
    get_metis_model(llama(), MetisConfig(split_weight=True)).save_pretrained(tmp_path)
    code = (
        "import transformers, sys\n"
        f"_, info = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, "
        "output_loading_info=True)\n"
        "assert 'metis_hf' not in sys.modules\n"
        "print(len(info['missing_keys']))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout.split()[-1]) == 14


def test_dense_checkpoint_with_quantization_config(token_ids, tmp_path):
    """from_pretrained(dense, quantization_config=...) equals converting after loading."""
    model = llama()
    model.save_pretrained(tmp_path)
    config = MetisConfig(seed=3)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert torch.equal(logits(loaded, token_ids), logits(get_metis_model(model, config), token_ids))
    assert not any(module.training for module in loaded.modules())


def test_tied_head_stays_tied(token_ids, tmp_path):
    model = get_metis_model(llama(tie_word_embeddings=True), MetisConfig())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert torch.equal(logits(reloaded, token_ids), logits(model, token_ids))


def test_deepcopy_and_pickle(token_ids):
    model = get_metis_model(llama(), MetisConfig())
    expected = logits(model, token_ids)
    assert torch.equal(logits(copy.deepcopy(model), token_ids), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), token_ids), expected)


def test_generate():
    model = get_metis_model(llama(), MetisConfig()).eval()
    out = model.generate(torch.randint(1, 256, (2, 5)), max_new_tokens=4, do_sample=False)
    assert out.shape[0] == 2
    assert out.shape[1] > 5


def test_padding_is_never_sampled():
    """The attention mask reaches the layers: what stands in masked rows cannot matter to v."""
    from metis_hf.operands.conditioners.spectral import Spectral

    seen, weights = [], []
    original = Spectral.split

    def spy(self, x, *, key, row_mask=None):
        (seen if len(x) == 2 * 40 else weights).append(row_mask)
        return original(self, x, key=key, row_mask=row_mask)

    config = MetisConfig(decompose=("weight", "activation", "gradient"))
    model = get_metis_model(llama(), config)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 25:] = 0
    ids = torch.randint(0, 256, (2, 40))
    Spectral.split = spy
    try:
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    finally:
        Spectral.split = original
    assert seen
    assert weights
    assert all(m is None for m in weights)
    assert all(torch.equal(m, mask.reshape(-1).bool()) for m in seen)


def test_target_and_exclude_modules():
    model = get_metis_model(
        llama(), MetisConfig(target_modules=["q_proj", "up_proj"], exclude_modules=r".*\.1\..*")
    )
    names = {name for name, _ in metis_layers(model)}
    assert names == {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"}
    skipped = model.metis_report.skipped
    assert skipped["model.layers.1.self_attn.q_proj"] == "excluded by exclude_modules"
    assert skipped["model.layers.0.self_attn.k_proj"] == "not a target"
    regex = get_metis_model(llama(), MetisConfig(target_modules=r".*layers\.1\.mlp\..*"))
    assert {n.rsplit(".", 1)[1] for n, _ in metis_layers(regex)} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_blocks_kept_in_high_precision():
    model = get_metis_model(llama(), MetisConfig(keep_last_blocks=1))
    assert all(".layers.0." in name for name, _ in metis_layers(model))
    assert model.metis_report.skipped["model.layers.1.mlp.up_proj"] == "keep_last_blocks=1"


@pytest.mark.parametrize("split", [False, True])
def test_report(split):
    model = get_metis_model(llama(), MetisConfig(split_weight=split))
    text = str(model.metis_report)
    assert "14 layers converted" in text
    assert "output head): lm_head" in text
    assert ("rank 32 (14 layers)" if split else "rank 32 (4 layers), 48 (10 layers)") in text
    assert ("split reproduces the weights to" in text) == split
    # 4.5 bits for a weight; for its share of the factors too, plus s: k = 32 of a 64 x 64 layer.
    layer = next(x for x in model.metis_report.layers if x.in_features == x.out_features == 64)
    assert layer.bits_per_weight == pytest.approx(4.5 * 2 + 0.25 if split else 4.5)
    assert layer.error < 1e-6
    assert (layer.error > 0) == split


def test_refresh_keeps_the_represented_weight():
    model = get_metis_model(llama(), MetisConfig(split_weight=True))
    layer = next(layer for _, layer in metis_layers(model))
    with torch.no_grad():
        layer.u.mul_(1 + 0.1 * torch.randn_like(layer.u))
    before, pointers = layer.weight.clone(), [p.data_ptr() for p in layer.weight_params()]
    assert refresh_layer(layer) < 1e-6
    torch.testing.assert_close(layer.weight, before, rtol=0, atol=1e-6)
    for basis in layer.weight_form.orthonormal(layer.weight_params()):
        gram = basis @ basis.T if basis.shape[0] == layer.rank else basis.T @ basis
        torch.testing.assert_close(gram, torch.eye(layer.rank), rtol=0, atol=1e-5)
    assert pointers == [p.data_ptr() for p in layer.weight_params()]


class TestErrors:
    """Each: a message that says what was asked, what is true, what to do; the model unchanged."""

    @staticmethod
    def refused(model, config, match):
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ValueError, match=match):
            get_metis_model(model, config)
        assert before == {name: type(module) for name, module in model.named_modules()}
        assert not hasattr(model, "metis_report")
        assert not model._forward_pre_hooks

    def test_unknown_scheme(self):
        self.refused(llama(), MetisConfig(scheme="metsi"), r"'metsi' is not registered.*'metis'")

    def test_nothing_matched(self):
        self.refused(
            llama(),
            MetisConfig(target_modules=["c_attn"]),
            r"names 'c_attn', which is no module of LlamaForCausalLM.*q_proj",
        )

    def test_no_linear(self):
        self.refused(
            nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)), MetisConfig(), "no nn.Linear"
        )

    @pytest.mark.parametrize("split", [False, True])
    def test_rank_above_half(self, split):
        self.refused(
            llama(),
            MetisConfig(rank_frac=0.9, split_weight=split),
            r"rank_frac=0.9 keeps 58 of 64.*at most 0.5",
        )

    def test_target_is_no_linear(self):
        self.refused(
            llama(), MetisConfig(target_modules=["self_attn"]), "self_attn is a LlamaAttention"
        )

    def test_tied_weight_that_would_be_split(self):
        config = MetisConfig(scheme="metis-paper", target_modules=["q_proj", "lm_head"])
        message = r"lm_head shares its weight with model.embed_tokens.*'metis-paper'.*untie"
        self.refused(llama(tie_word_embeddings=True), config, message)
        get_metis_model(llama(), config)  # not tied: split like every other layer
        one = config.replace(scheme_pattern={"lm_head": "nvfp4"})
        model = get_metis_model(llama(tie_word_embeddings=True), one)
        assert isinstance(model.lm_head, QuantLinear)

    def test_tied_inner_layers(self):
        model = llama()
        a, b = (model.model.layers[i].mlp.up_proj for i in (0, 1))
        b.weight = a.weight
        get_metis_model(model, MetisConfig())
        assert "weight tied to" in model.metis_report.skipped["model.layers.0.mlp.up_proj"]

    def test_non_finite_weight(self):
        model = llama()
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        self.refused(model, MetisConfig(), r"layers.1.mlp.up_proj: the weight has NaN")

    def test_converted_twice(self):
        model = get_metis_model(llama(), MetisConfig(scheme="nvidia"))
        with pytest.raises(ValueError, match=r"converted already.*'nvidia'"):
            get_metis_model(model, MetisConfig())

    def test_to_dense_of_a_plain_model(self):
        with pytest.raises(ValueError, match="no Metis layer"):
            to_dense(llama())

    def test_checkpoint_of_an_unregistered_scheme(self, tmp_path):
        name = "house-scheme"
        register_scheme(name, summary="x", source="x")(lambda config, rank: Scheme())
        try:
            get_metis_model(llama(), MetisConfig(scheme=name)).save_pretrained(tmp_path)
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        finally:
            del registry._REGISTRY[name]
        with pytest.raises(ValueError, match="'house-scheme' is not registered"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    def test_checkpoint_with_an_unknown_key(self, tmp_path):
        get_metis_model(llama(), MetisConfig()).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"]["rank_fraction"] = 1
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match="unknown key 'rank_fraction'"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    def test_no_model_and_no_config(self):
        with pytest.raises(TypeError, match="a loaded model, and this is 'HuggingFaceTB/SmolLM2'"):
            get_metis_model("HuggingFaceTB/SmolLM2")
        with pytest.raises(TypeError, match="is no MetisConfig; pass MetisConfig"):
            get_metis_model(llama(1), {"scheme": "metis"})

    def test_scheme_name_taken(self):
        with pytest.raises(ValueError, match="already registered"):
            register_scheme("metis", summary="", source="")(lambda config, rank: Scheme())


def test_two_configs_in_one_process(token_ids):
    """No process-global numerics: converting one model changes nothing of another."""
    first = get_metis_model(llama(), MetisConfig(scheme="nvfp4"))
    expected = logits(first, token_ids)
    second = get_metis_model(llama(), MetisConfig(scheme="metis", seed=9))
    logits(second, token_ids)
    assert torch.equal(logits(first, token_ids), expected)
    assert isinstance(next(metis_layers(first))[1], QuantLinear)
    assert next(metis_layers(second))[1].scheme.splits


def test_frozen_split_weights_are_frozen_dense_ones():
    model = get_metis_model(llama(), MetisConfig(split_weight=True))
    layers = dict(metis_layers(model))
    frozen = next(name for name in layers if name.endswith("up_proj"))
    layers[frozen].requires_grad_(False)
    to_dense(model)
    for name in layers:
        assert model.get_submodule(name).weight.requires_grad == (name != frozen), name
