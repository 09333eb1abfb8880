"""The output head as a target: with a weight of its own, and with the embeddings' weight."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import llama
from tensors import assert_same, logits
from torch import nn

from conversion.architectures import ARCHITECTURES
from conversion.packed_tools import dense_twin
from metis_hf import (
    MetisConfig,
    QuantLinear,
    get_metis_model,
    load_packed,
    metis_layers,
    reuse_weights,
    to_dense,
)
from metis_hf.deploy import export_checkpoint
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.token_mask import TokenMask
from metis_hf.training.precision import high_precision

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
SCHEMES = ["nvidia", "metis", "w4a4"]  # tiles, split by call, with a state


def converted(tied=True, scheme="nvfp4-rne", **changes):
    model = llama(tie_word_embeddings=tied)
    return get_metis_model(model, MetisConfig(scheme=scheme, target_modules=TARGETS, **changes))


def is_tied(model):
    return model.lm_head.weight is model.model.embed_tokens.weight


def gradients(model, ids):
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    return found


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
class TestTied:
    def test_gradient_is_the_sum_of_both_uses(self, scheme, token_ids):
        """Beside a model of equal weights in which the two are apart: exact up to the sum."""
        tied = converted(scheme=scheme)
        apart = converted(tied=False, scheme=scheme)
        with torch.no_grad():
            for name, param in apart.named_parameters():
                same = "model.embed_tokens.weight" if name == "lm_head.weight" else name
                param.copy_(tied.get_parameter(same))
        assert is_tied(tied)
        assert not is_tied(apart)
        one, two = gradients(tied, token_ids), gradients(apart, token_ids)
        assert two["lm_head.weight"].abs().sum() > 0
        two["model.embed_tokens.weight"] += two.pop("lm_head.weight")
        assert one.keys() == two.keys()
        for name, expected in two.items():
            torch.testing.assert_close(one[name], expected, rtol=0, atol=0, msg=name)

    def test_lookup_stays_exact_and_the_gemm_is_quantized(self, scheme, token_ids):
        model = converted(scheme=scheme)
        assert isinstance(model.lm_head, QuantLinear)
        weight = model.model.embed_tokens.weight
        assert torch.equal(model.model.embed_tokens(token_ids), F.embedding(token_ids, weight))
        hidden = model.eval().model(input_ids=token_ids).last_hidden_state
        exact = F.linear(hidden, weight)
        assert not torch.equal(model(input_ids=token_ids).logits, exact)
        with high_precision(model):
            hidden = model.model(input_ids=token_ids).last_hidden_state
            found = model(input_ids=token_ids).logits
        assert torch.equal(found, F.linear(hidden, weight))

    def test_save_reload_and_dense(self, scheme, token_ids, tmp_path):
        model = converted(scheme=scheme)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model.train()(input_ids=token_ids, labels=token_ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert is_tied(model)
        expected = logits(model, token_ids)
        model.save_pretrained(tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert is_tied(again)
        assert isinstance(again.lm_head, QuantLinear)
        assert torch.equal(logits(again, token_ids), expected)
        weight = again.lm_head.weight
        dense = to_dense(again)
        assert type(dense.lm_head) is nn.Linear
        assert is_tied(dense)
        assert dense.lm_head.weight is weight
        dense.save_pretrained(tmp_path / "dense")
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
        assert is_tied(plain)
        assert torch.equal(logits(plain, token_ids), logits(dense, token_ids))

    def test_reused_weights_change_nothing(self, scheme, token_ids):
        model = converted(scheme=scheme)
        batches = token_ids.split(1)

        def accumulate(model):
            for rows in batches:
                model.train()(input_ids=rows, labels=rows).loss.backward()
            return {name: param.grad for name, param in model.named_parameters()}

        expected = accumulate(copy.deepcopy(model))
        with reuse_weights(model):
            found = accumulate(model)
        assert_same(found, expected)


def test_dense_checkpoint_converts_while_it_loads(token_ids, tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    config = MetisConfig(scheme="nvidia", target_modules=TARGETS)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert is_tied(loaded)
    assert torch.equal(logits(loaded, token_ids), logits(get_metis_model(model, config), token_ids))


def test_layers_that_share_one_weight():
    model = llama()
    a, b = (model.model.layers[i].mlp.up_proj for i in (0, 1))
    b.weight = a.weight
    get_metis_model(model, MetisConfig(scheme="nvidia", target_modules=["up_proj"]))
    layers = dict(metis_layers(model))
    assert len({id(layer.weight) for layer in layers.values()}) == 1
    to_dense(model)
    one, two = (model.model.layers[i].mlp.up_proj for i in (0, 1))
    assert one.weight is two.weight


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_packed_export_stores_the_two_apart(format, tmp_path):
    model = converted()
    weight = model.lm_head.weight.detach().clone()
    model.save_pretrained(tmp_path / "metis")
    report = export_checkpoint(tmp_path / "metis", tmp_path / "out", format=format)
    assert "lm_head" in report.packed
    assert any("lm_head" in note and "model.embed_tokens" in note for note in report.notes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    packed = load_packed(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(packed.model.embed_tokens.weight, weight.bfloat16().float())
    expected = model.lm_head.eval_scheme.fprop_weight.quantizer(weight, dim=-1)
    torch.testing.assert_close(packed.lm_head.weight, expected, rtol=2**-8, atol=0)
    if format == "compressed-tensors":  # transformers reads the same
        theirs, ours = dense_twin(tmp_path / "out", torch.bfloat16), load_packed(tmp_path / "out")
        assert torch.equal(theirs.lm_head.weight, ours.lm_head.weight)
        assert torch.equal(theirs.model.embed_tokens.weight, ours.model.embed_tokens.weight)


def test_dense_export_keeps_the_tie(tmp_path):
    converted().save_pretrained(tmp_path / "metis")
    report = export_checkpoint(tmp_path / "metis", tmp_path / "out", dtype="float32")
    assert report.notes == ()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert is_tied(plain)


def test_head_of_an_encoder_decoder_has_the_decoders_mask():
    """Both sides are equally long, so that the encoder's mask would fit its rows as well."""
    model = ARCHITECTURES["t5"].build()
    get_metis_model(model, MetisConfig(target_modules=["q", "lm_head"]))
    head = model.lm_head
    assert isinstance(head, MetisLayer)
    assert isinstance(head.token_mask, TokenMask)
    assert head.token_mask.argument == "decoder_attention_mask"


def test_a_class_of_ones_own_has_no_head_by_its_name():
    """Only models of transformers are called by what they are for."""

    class PairForTokenClassification(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    model = get_metis_model(PairForTokenClassification(), MetisConfig(scheme="nvfp4-rne"))
    assert len(dict(metis_layers(model))) == 2
