"""Exports of models that name, tie or keep their weights otherwise than Llama does."""

from __future__ import annotations

import fnmatch
import json
import re

import pytest
import torch
import transformers
from conftest import bart, llama, t5
from safetensors.torch import load_file
from tensors import logits
from texts import documents
from transformers import CompressedTensorsConfig
from versions import reads_packed

from deploy.checkpoints import mixtral, recorded_rows
from metis_hf import MetisConfig, calibrate, get_metis_model, load_packed, to_dense
from metis_hf.data.corpus import train_tokenizer
from metis_hf.data.perplexity import check_reference
from metis_hf.deploy import export_checkpoint, load_low_rank
from metis_hf.deploy.source import held_out_windows
from metis_hf.lab.calibrated import Calibration, calibrated_model, calibration_rows

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ROUNDED = 0.15  # relative error of a weight in FP4 in two parts


def llava():
    """A model whose files name its layers otherwise than the model in memory does."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, projection_dim=32,
    )  # fmt: skip
    text = transformers.LlamaConfig(**TINY, intermediate_size=32)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)
    )


def test_side_file_of_a_model_with_other_names_in_its_files(tmp_path):
    target = r"model\.language_model\..*_proj"
    config = MetisConfig(scheme="metis-paper", rank=4, target_modules=target)
    model = get_metis_model(llava(), config)
    model.generation_config.eos_token_id = [5, 6]
    model.save_pretrained(tmp_path / "run")
    exact = {name: param.clone() for name, param in to_dense(model).named_parameters()}
    export_checkpoint(
        tmp_path / "run", tmp_path / "out", format="compressed-tensors", low_rank="side-file"
    )
    loaded = load_low_rank(tmp_path / "out")
    found = dict(loaded.named_parameters())
    split = [name for name in exact if "language_model" in name and "_proj" in name]
    assert len(split) == 7
    for name in split:  # of the residual alone it is .6
        assert (found[name] - exact[name]).norm() < ROUNDED * exact[name].norm(), name
    assert loaded.generation_config.eos_token_id == [5, 6]


def test_the_context_of_a_composite_model_is_that_of_its_text(tmp_path):
    """Only the part that reads text says how long it may be."""
    vocabulary = 300
    text = TINY | {"intermediate_size": 32, "vocab_size": vocabulary, "max_position_embeddings": 16}
    config = transformers.Gemma3Config(text_config=text)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    train_tokenizer(documents()[:2], vocab_size=vocabulary).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    path = tmp_path / "text.txt"
    path.write_text(documents()[5].text[:1000])
    assert {window.shape[1] for window in held_out_windows(tmp_path, path)[:-1]} == {16}
    assert calibration_rows(config, tmp_path, Calibration(text=path)).shape[1] == 16
    with pytest.raises(ValueError, match=r"do not fit the context .* choose at most 15"):
        check_reference(str(tmp_path), 16)


@pytest.mark.parametrize(
    ("build", "named"),
    [(llava, r"layers, but not model\.vision_tower\."), (mixtral, None), (None, None)],
    ids=["an image encoder without an image", "experts without tokens", "no decoder"],
)
def test_weights_alone_name_layers_that_text_does_not_reach(build, named, tmp_path, caplog):
    bert = transformers.BertConfig(**TINY, intermediate_size=32)
    (build() if build else transformers.BertForMaskedLM(bert)).save_pretrained(tmp_path)
    calibrated_model(tmp_path, Calibration(None, scheme="w4a16"))
    assert bool(caplog.text) == bool(named)
    assert re.search(named or "", caplog.text)


def test_all_that_was_tied_to_a_packed_head_is_written(tmp_path):
    model = bart()
    shared = model.model.shared.weight.detach().clone()
    get_metis_model(model, MetisConfig(scheme="w4a16", target_modules=["q_proj", "lm_head"]))
    calibrate(model, [])
    model.save_pretrained(tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out", format="compressed-tensors")
    loaded, info = transformers.BartForConditionalGeneration.from_pretrained(
        tmp_path / "out",
        quantization_config=CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    for part in (loaded.model.shared, loaded.model.encoder, loaded.model.decoder):
        embedding = getattr(part, "embed_tokens", part).weight
        torch.testing.assert_close(embedding.float(), shared, atol=0, rtol=2**-8)


def test_what_a_model_keeps_in_fp32_stays_so(tmp_path):
    config = transformers.DeepseekV3Config(
        **TINY | {"num_hidden_layers": 2}, num_key_value_heads=2, intermediate_size=32,
        moe_intermediate_size=32, n_shared_experts=1, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    (name,) = [name for name, _ in model.named_buffers() if "e_score" in name]
    bias = 4 + 0.01 * torch.randn(8, generator=torch.Generator().manual_seed(0))
    model.get_buffer(name).copy_(bias)
    get_metis_model(model, MetisConfig(scheme="nvfp4")).save_pretrained(tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    loaded = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight.dtype is torch.bfloat16
    assert torch.equal(loaded.get_buffer(name), bias)


def test_what_float16_would_overflow_stays_in_fp32(tmp_path):
    get_metis_model(t5(), MetisConfig(scheme="nvfp4")).save_pretrained(tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out", dtype="float16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name for name, tensor in tensors.items() if tensor.dtype is torch.float32}
    assert kept == {name for name in tensors if ".wo." in name} != set()
    assert {t.dtype for n, t in tensors.items() if n not in kept} == {torch.float16}


@reads_packed
def test_the_lines_that_load_a_packed_model_run(tmp_path):
    """T5's initializer reads weights, which packed layers do not have."""
    pytest.importorskip("compressed_tensors")
    get_metis_model(t5(), MetisConfig(scheme="nvfp4")).save_pretrained(tmp_path / "run")
    out = tmp_path / 'so "called"'
    report = export_checkpoint(tmp_path / "run", out, format="compressed-tensors")
    scope: dict = {}
    exec(report.loading, scope)
    assert type(scope["model"]) is transformers.T5ForConditionalGeneration
    assert any("T5ForConditionalGeneration reads weights" in note for note in report.notes)
    card = (out / "README.md").read_text()
    assert "quantization_config=CompressedTensorsConfig(dequantize=True)" in card
    plain = export_checkpoint(tmp_path / "run", tmp_path / "dense")
    assert "CompressedTensorsConfig" not in plain.loading


def test_a_weight_of_zeros_has_no_error(tmp_path):
    model = llama(1)
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    get_metis_model(model, MetisConfig(scheme="nvfp4")).save_pretrained(tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out", format="compressed-tensors")
    rows = recorded_rows(tmp_path / "out")
    zero = rows["up_proj"]
    assert (zero["mean_error"], zero["max_error"], zero["sqnr_db"]) == (0.0, 0.0, None)
    assert 0.05 < rows["down_proj"]["mean_error"] < ROUNDED


def test_the_target_may_be_a_link_to_an_empty_directory(tmp_path):
    get_metis_model(llama(1), MetisConfig(scheme="nvfp4")).save_pretrained(tmp_path / "run")
    (tmp_path / "place").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "place")
    (tmp_path / "place.partial").mkdir()
    (tmp_path / "place.partial" / "mine").write_text("not of this export")
    report = export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "place" / "model.safetensors").is_file()
    assert str(tmp_path / "out") in report.loading
    assert (tmp_path / "place.partial" / "mine").is_file()


def test_packed_beside_experts_says_who_reads_it(tmp_path):
    model = qwen3_moe()
    get_metis_model(model, MetisConfig(scheme="w4a16", exclude_modules=".*experts.*"))
    calibrate(model, [])
    model.save_pretrained(tmp_path / "run")
    report = export_checkpoint(tmp_path / "run", tmp_path / "out", format="compressed-tensors")
    assert any(
        "fused experts, which are not packed. metis_hf.load_packed reads" in note
        for note in report.notes
    )
    loaded = load_packed(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(16).reshape(1, -1)
    found, trained = (logits(loaded, ids), logits(model, ids))
    torch.testing.assert_close(found, trained, rtol=0.02, atol=0.02)  # the rest is in bf16


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        **TINY, intermediate_size=32, moe_intermediate_size=32, num_experts=4, head_dim=16,
        num_experts_per_tok=2, num_key_value_heads=2, decoder_sparse_step=1,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def ignored(path):
    """The names and patterns of a checkpoint, and whether an engine leaves a layer out by them."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    names = config["ignore"]
    if config["quant_method"] == "modelopt":
        described = json.loads((path / "hf_quant_config.json").read_text())
        assert described["quantization"]["exclude_modules"] == names
        return names, lambda layer: any(fnmatch.fnmatchcase(layer, name) for name in names)
    patterns = [name[3:] for name in names if name.startswith("re:")]
    return names, lambda layer: layer in names or any(re.match(p, layer) for p in patterns)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    ("build", "place", "expert"),
    [(mixtral, "block_sparse_moe", "w1"), (qwen3_moe, "mlp", "gate_proj")],
    ids=["mixtral", "qwen"],
)
def test_experts_and_routers_are_ignored_by_their_names_in_the_files(
    build, place, expert, layout, tmp_path
):
    """What the config does not ignore, engines take for packed."""
    model = get_metis_model(build(), MetisConfig(scheme="nvfp4-rne", exclude_modules=".*experts.*"))
    model.save_pretrained(tmp_path / "run")
    report = export_checkpoint(tmp_path / "run", tmp_path / "out", format=layout)
    names, is_ignored = ignored(tmp_path / "out")
    state = load_file(tmp_path / "out/model.safetensors")
    matrices = {
        key.removesuffix(".weight")
        for key, tensor in state.items()
        if key.endswith(".weight") and tensor.dim() == 2 and "embed_tokens" not in key
    }
    dense = matrices - set(report.packed)
    block = f"model.layers.0.{place}"
    assert {f"{block}.gate", f"{block}.experts.0.{expert}"} <= dense
    assert all(is_ignored(name) for name in dense)
    assert is_ignored(f"{block}.experts")  # as vLLM names all of them
    assert not any(is_ignored(name) for name in report.packed)
    load_packed(tmp_path / "out").save_pretrained(tmp_path / "again")
    again, is_ignored = ignored(tmp_path / "again")
    assert all(is_ignored(name) for name in dense)
    assert not any(is_ignored(name) for name in report.packed)
    assert layout == "modelopt" or again == names


def test_a_packed_head_is_said_to_be_one(tmp_path):
    config = MetisConfig(scheme="nvfp4-rne", target_modules=["lm_head", "down_proj"])
    get_metis_model(llama(1), config).save_pretrained(tmp_path / "run")
    report = export_checkpoint(tmp_path / "run", tmp_path / "out", format="compressed-tensors")
    (note,) = report.notes
    assert note.startswith("lm_head is the output head and is packed in four bits")
