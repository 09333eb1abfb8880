"""Which checkpoint is meant, what it is called, what it can be evaluated in, what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import SIZES, bert, llama
from peft import LoraConfig, get_peft_model
from tensors import logits

from lab.evaluate.eval_tools import DATA, make_model, run, save
from metis_hf import (
    MetisConfig,
    calibrate,
    get_metis_model,
    load_packed,
    metis_layers,
    to_dense,
)
from metis_hf.deploy import export_checkpoint
from metis_hf.lab import model_source as opening
from metis_hf.lab.checkpoint import Checkpoint
from metis_hf.lab.evaluate.harness import MetisLM
from metis_hf.lab.evaluate.paper import published_method
from metis_hf.lab.model_source import open_checkpoint, open_checkpoints

CPU = torch.device("cpu")
BF16_TOLERANCE = 0.02  # some 20 roundings to 2^-9 on the way through one block, and a margin


@pytest.fixture
def ids():
    return torch.arange(40)[None]


def test_directories_of_a_run(tmp_path):
    run = tmp_path / "run"
    for step in (9, 10, 100):
        save(run / f"checkpoint-{step}", "metis")
    found = open_checkpoint(run)
    assert (found.path.name, found.label) == ("checkpoint-100", "run/checkpoint-100")
    save(run / "model", "nvfp4")
    assert open_checkpoint(run).scheme == "nvfp4"  # the finished model wins
    assert open_checkpoint(run).label == open_checkpoint(run / "model").label == "run"
    assert open_checkpoint(run / "checkpoint-9").label == "run/checkpoint-9"


def test_labels_tell_apart(tmp_path):
    paths = [save(tmp_path / scheme / "seed-0" / "model", scheme) for scheme in ("bf16", "nvfp4")]
    assert [c.label for c in open_checkpoints(paths)] == ["bf16/seed-0", "nvfp4/seed-0"]
    with pytest.raises(ValueError, match=r"named twice: .*seed-0/model"):
        open_checkpoints([paths[0], paths[0].parent])
    run = save(tmp_path / "run", "nvfp4")  # a run that holds two, under one name
    save(run / "model", "bf16")
    found = open_checkpoints([run, run / "model"])
    assert [c.label for c in found] == [f"{tmp_path.name}/run", "run/model"]


@pytest.mark.skipif(os.name == "nt", reason="paths begin with a drive")
def test_a_directory_at_the_root_with_the_name_of_a_model_of_the_hub(monkeypatch):
    """As in a container, where models are mounted there."""
    places = {"/gpt2": Path("/gpt2"), "gpt2": Path("/cache/models--gpt2/snapshots/abc")}
    named = {name: Checkpoint(place, "gpt2", {}) for name, place in places.items()}
    monkeypatch.setattr(opening, "open_model", named.__getitem__)
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) == "/gpt2")
    assert [one.label for one in open_checkpoints(list(places))] == ["/gpt2", "gpt2"]


def test_what_is_not_quantized_has_one_precision(tmp_path):
    for scheme in (None, "bf16"):
        checkpoint = open_checkpoint(save(tmp_path / str(scheme), scheme))
        assert checkpoint.scheme == (scheme or "dense")
        for asked in ("scheme", "dense", "both"):
            assert checkpoint.precisions(asked) == ("dense",)


@pytest.mark.parametrize(
    ("scheme", "options", "name", "method"),
    [
        ("metis", {}, "metis", "FP4-Metis"),
        ("bf16", {"attention": "nvfp4-rne"}, "bf16, attention nvfp4-rne", None),
    ],
)
def test_both_precisions_are_what_they_say(scheme, options, name, method, tmp_path, ids):
    checkpoint = open_checkpoint(save(tmp_path, scheme, **options))
    assert checkpoint.scheme == name
    assert checkpoint.precisions("both") == ("scheme", "dense")
    for asked in ("scheme", "dense"):
        assert checkpoint.precisions(asked) == (asked,)
    assert published_method(checkpoint.quantization) == method
    dense = open_checkpoint(save(tmp_path / "dense", None))
    converted = replace(dense, conversion=checkpoint.metis)
    assert (converted.scheme, converted.precisions("both")) == (name, ("scheme",))
    trained = make_model(scheme, **options)
    quantized, dense_model = (checkpoint.load(each, "auto", CPU) for each in ("scheme", "dense"))
    assert not quantized.training
    assert not dense_model.training
    assert not torch.equal(logits(quantized, ids), logits(dense_model, ids))
    assert torch.equal(logits(quantized, ids), logits(trained, ids))
    assert torch.equal(logits(dense_model, ids), logits(to_dense(trained), ids))
    assert not list(metis_layers(dense_model))
    assert checkpoint.load("scheme", "bfloat16", CPU).dtype == torch.bfloat16


def test_exports_load(tmp_path, tokenizer, ids):
    source = save(tmp_path / "run", "metis", tokenizer)
    dense = tmp_path / "dense"
    export_checkpoint(source, dense, dtype="float32")
    checkpoint = open_checkpoint(dense)
    assert (checkpoint.scheme, checkpoint.label) == ("dense", "dense")
    wanted = open_checkpoint(source).load("dense", "auto", CPU)
    assert torch.equal(logits(checkpoint.load("scheme", "auto", CPU), ids), logits(wanted, ids))
    checkpoint.tokenizer()


def test_packed_export(tmp_path, tokenizer, ids, monkeypatch):
    pytest.importorskip("compressed_tensors")
    packed = tmp_path / "packed"
    export_checkpoint(
        save(tmp_path / "run", "metis", tokenizer), packed, format="compressed-tensors"
    )
    checkpoint = open_checkpoint(packed)
    assert checkpoint.scheme == "compressed-tensors"
    checkpoint.check("scheme")
    assert checkpoint.precisions("both") == ("scheme",)
    with torch.no_grad():
        found = checkpoint.load("scheme", "auto", CPU)(ids).logits
        assert found.isfinite().all()
        # The library unpacks to bfloat16 at the first forward pass; another dtype needs it sooner.
        exact = checkpoint.load("scheme", "float32", CPU)(ids).logits
    assert (found.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert (found - exact).norm() < BF16_TOLERANCE * exact.norm()
    with pytest.raises(ValueError, match="contains compressed-tensors weights only"):
        checkpoint.check("dense")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed; run pip install compressed-tensors"):
        checkpoint.check("scheme")


@pytest.mark.parametrize("scheme", [None, "metis", "packed"])
def test_adapters(scheme, tmp_path, tokenizer, ids):
    """A PEFT adapter stands for its model with the adapter on top."""
    base = save(tmp_path / "base", "nvfp4-rne" if scheme == "packed" else scheme, tokenizer)
    if scheme == "packed":
        export_checkpoint(base, tmp_path / "packed", format="compressed-tensors")
        base = tmp_path / "packed"
    bare = open_checkpoint(base)
    model = load_packed(base, dtype=torch.float32) if scheme == "packed" else make_model(scheme)
    model.name_or_path = str(base)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    checkpoint = open_checkpoint(tmp_path / "adapter")
    assert (checkpoint.path, checkpoint.scheme) == (base, bare.scheme)
    assert checkpoint.label == "adapter"
    found = checkpoint.load("scheme", "float32", CPU)
    assert torch.equal(logits(found, ids), logits(model, ids))
    assert not torch.equal(logits(found, ids), logits(bare.load("scheme", "float32", CPU), ids))
    assert checkpoint.fingerprint() != bare.fingerprint()
    checkpoint.tokenizer()
    both = open_checkpoints([base, tmp_path / "adapter"])
    assert [one.adapter is None for one in both] == [True, False]
    lm = MetisLM(str(tmp_path / "adapter"), device="cpu", dtype="float32")
    assert torch.equal(logits(lm.model, ids), logits(found, ids))


def test_an_adapter_over_a_plain_model_that_was_converted(tmp_path, tokenizer, ids):
    """The scheme of its training is the row's, and what is computed."""
    base = save(tmp_path / "base", None, tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    get_metis_model(model, MetisConfig(scheme="nvfp4"))
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    checkpoint = open_checkpoint(tmp_path / "adapter")
    assert checkpoint.scheme == "nvfp4"
    assert checkpoint.precisions("both") == ("scheme", "dense")
    assert checkpoint.precisions("dense") == ("dense",)
    found = checkpoint.load("scheme", "auto", CPU)
    assert torch.equal(logits(found, ids), logits(model, ids))
    dense = checkpoint.load("dense", "auto", CPU)
    assert not torch.equal(logits(dense, ids), logits(found, ids))
    assert next(metis_layers(dense), None) is None
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"with incomplete weights: no adapter_model\.safetensors"):
        open_checkpoint(tmp_path / "adapter")


def test_adapters_in_the_output_directory_of_a_trainer(tmp_path, tokenizer, caplog):
    model = get_peft_model(make_model(), LoraConfig(target_modules="all-linear"))
    model.base_model.model.name_or_path = str(save(tmp_path / "base", None, tokenizer))
    run = tmp_path / "run"
    for step in (2, 10):
        model.save_pretrained(run / f"checkpoint-{step}")
    assert open_checkpoint(run).place == run / "checkpoint-10"
    assert not caplog.text
    weights = run / "checkpoint-10/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert open_checkpoint(run).place == run / "checkpoint-2"
    assert "checkpoint-10 is incomplete (adapter_model.safetensors is truncated)" in caplog.text
    model.save_pretrained(run / "model")
    assert (open_checkpoint(run).place, open_checkpoint(run).label) == (run / "model", "run")
    with pytest.raises(ValueError, match=r"no checkpoint .* below it: .*/base .*/run"):
        open_checkpoint(tmp_path)


def test_packed_inputs_are_quantized_in_every_dtype(tmp_path, tokenizer, ids):
    pytest.importorskip("compressed_tensors")
    model = make_model("w4a4")
    layers = [layer for _, layer in metis_layers(model)]
    for module in model.modules():  # the export has them in BF16
        if module not in layers:
            for param in module.parameters(recurse=False):
                param.data = param.data.bfloat16().float()
    calibrate(model, [ids])
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "packed", format="compressed-tensors")
    checkpoint = open_checkpoint(tmp_path / "packed")
    found = logits(checkpoint.load("scheme", "float32", CPU), ids)
    expected = logits(model, ids)
    assert (found - expected).norm() < 1e-3 * expected.norm()
    lm = MetisLM(str(tmp_path / "packed"), device="cpu", dtype="float32")
    assert torch.equal(lm.model(ids).logits, found)
    config = json.loads((tmp_path / "packed/config.json").read_text())
    config["quantization_config"]["format"] = "int-quantized"
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    said = r"quantizes inputs \(int-quantized\), which .* only in bfloat16"
    with pytest.raises(ValueError, match=said):
        open_checkpoint(tmp_path / "packed").load("scheme", "float32", CPU)


def test_schemes_that_nobody_knows_are_named(tmp_path):
    known = {"quant_method": "metis", "scheme": "bf16"}
    for options, message in (
        ({"attention": "mine"}, "scheme 'mine' is not registered"),
        ({"scheme_pattern": {"down_proj": "mine"}}, "scheme 'mine' is not registered"),
        ({"atention": "nvfp4"}, r"config\.json: unknown key 'atention'"),
    ):
        with pytest.raises(ValueError, match=message):
            Checkpoint(tmp_path, "one", known | options).check("scheme")


def test_fingerprint_is_of_weights_and_config(tmp_path):
    """An adapter's too: its alpha scales what it adds."""
    one = open_checkpoint(save(tmp_path / "a", "metis"))
    same = open_checkpoint(save(tmp_path / "b", "metis"))
    assert one.fingerprint() == same.fingerprint()
    assert one.fingerprint() != open_checkpoint(save(tmp_path / "c", "metis", seed=1)).fingerprint()
    config = json.loads((same.path / "config.json").read_text())
    config["quantization_config"]["two_level"] = False
    (same.path / "config.json").write_text(json.dumps(config))
    assert one.fingerprint() != same.fingerprint()
    model = get_peft_model(make_model(), LoraConfig(target_modules="all-linear", lora_alpha=8))
    model.base_model.model.name_or_path = str(one.path)
    model.save_pretrained(tmp_path / "adapter")
    before = open_checkpoint(tmp_path / "adapter").fingerprint()
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 16}))
    assert open_checkpoint(tmp_path / "adapter").fingerprint() != before


def test_refusals(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory; name a checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    save(tmp_path / "runs" / "one" / "model", None)
    with pytest.raises(ValueError, match=r"runs contains no checkpoint .* below it: .*runs/one"):
        open_checkpoint(tmp_path / "runs")
    adapter = tmp_path / "adapter"
    for settings, message in (
        ({"task_type": "SEQ_CLS", "base_model_name_or_path": "x"}, "of x for SEQ_CLS"),
        ({"base_model_name_or_path": None}, "of a model without name for no task"),
        (
            {"base_model_name_or_path": str(tmp_path / "gone")},
            "its base model was not found: .*Correct",
        ),
    ):
        LoraConfig(**settings).save_pretrained(adapter)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(adapter)
    bare = save(tmp_path / "bare", None)
    with pytest.raises(ValueError, match="bare contains no tokenizer; save one there with"):
        open_checkpoint(bare).tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert open_checkpoint(bare).tokenizer(tmp_path / "tokenizer").vocab_size == len(tokenizer)
    (bare / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"bare has a config.json but no weights"):
        open_checkpoint(bare)


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    """Its head would be random; one that is tied to the embedding is known."""
    for tied in (False, True):
        config = llama(1, tie_word_embeddings=tied).config
        model = transformers.LlamaForSequenceClassification(config)
        get_metis_model(model, MetisConfig(scheme="metis", rank=8))
        model.save_pretrained(tmp_path / str(tied))
    said = r"False lacks lm_head\.weight, .* saved from LlamaForSequenceClass"
    with pytest.raises(ValueError, match=said):
        open_checkpoint(tmp_path / "False").load("dense", "auto", CPU)
    assert open_checkpoint(tmp_path / "True").load("dense", "auto", CPU).lm_head is not None


def test_an_encoder_is_refused(tmp_path):
    """Before it is loaded; the same model as a decoder is none."""
    for decoder in (False, True):
        bert("LMHeadModel", is_decoder=decoder).save_pretrained(tmp_path / str(decoder))
    encoder, decoder = (open_checkpoint(tmp_path / name) for name in ("False", "True"))
    with pytest.raises(ValueError, match=r"a bert encoder: .*is_decoder: true in its config\.json"):
        encoder.config()
    assert decoder.load("scheme", "auto", CPU).config.is_decoder
    # Models whose class does not read the field are causal, whatever a config.json carries.
    config = transformers.GPTNeoXConfig(**SIZES, num_hidden_layers=1)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    llama(1, is_decoder=False).save_pretrained(tmp_path / "llama")
    for name in ("neox", "llama"):
        assert json.loads((tmp_path / name / "config.json").read_text())["is_decoder"] is False
        open_checkpoint(tmp_path / name).config()


def test_files_cut_short_are_named(tmp_path, tokenizer):
    place = save(tmp_path / "cut", None, tokenizer)
    for name in ("tokenizer_config.json", "tokenizer.json", "config.json"):
        text = (place / name).read_text()
        (place / name).write_text(text[: len(text) // 2])
        with pytest.raises(ValueError, match=rf"{name} is (truncated|not a valid JSON file)"):
            open_checkpoint(place).tokenizer()
        (place / name).write_text(text)


def test_added_tokens_beyond_the_model_may_stay_unused(tmp_path, tokenizer):
    """As of the tokenizers of text-only models that have siblings for pictures."""
    place = save(tmp_path / "more", None, tokenizer)
    tokenizer = open_checkpoint(place).tokenizer()
    tokenizer.add_tokens([f"<unused{n}>" for n in range(600)])
    given = [place, "--tasks", "piqa", "--tasks-dir", DATA, "--limit", 1, "--out", tmp_path / "out"]
    tokenizer.save_pretrained(place)
    assert run(*given).exit_code == 0
    tokenizer.bos_token = "<unused599>"  # what rolling likelihoods begin with
    tokenizer.save_pretrained(place)
    with pytest.raises(
        ValueError, match=r"produces tokens up to \d+, but the model's vocabulary has 512"
    ):
        raise run(*given).exception
