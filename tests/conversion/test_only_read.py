"""Layers that are reported as converted are called; what their owners read or write stays."""

from __future__ import annotations

import pytest
import torch
import transformers

from metis_hf import MetisConfig, get_metis_model, metis_layers

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
SSM = {**SIZES, "state_size": 16}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
# Name of the architecture: (class, options, names that are only read).
MODELS = {
    "wavlm": (
        "WavLMModel",
        {
            "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 64, "conv_dim": (32, 32), "conv_stride": (5, 2),
            "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
        },
        {"q_proj", "k_proj", "v_proj", "out_proj"},
    ),
    "mamba": ("MambaForCausalLM", SSM, {"x_proj", "dt_proj", "out_proj"}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {**SSM, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
        {"out_proj"},
    ),
    "jamba": (
        "JambaForCausalLM",
        {**HEADS, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
         "num_experts_per_tok": 1, "mamba_d_state": 16},
        {"dt_proj"},
    ),
    "bamba": (
        "BambaForCausalLM",
        {**HEADS, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_d_state": 16,
         "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8},
        {"out_proj"},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {**HEADS, "head_dim": 16, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0,
         "hidden_size_per_layer_input": 16, "laurel_rank": 16, "altup_num_inputs": 2,
         "altup_coef_clip": 120.0},
        {"correction_coefs"},
    ),
    "bloom": (
        "BloomForCausalLM",
        {**SIZES, "n_head": 4, "pretraining_tp": 2, "slow_but_exact": True},
        {"dense", "dense_4h_to_h"},
    ),
    "reformer": (
        "ReformerModelWithLMHead",
        {"hidden_size": 64, "vocab_size": 64, "attn_layers": ["lsh"], "num_attention_heads": 4,
         "attention_head_size": 16, "feed_forward_size": 64, "is_decoder": True,
         "axial_pos_embds": False, "lsh_attn_chunk_length": 8, "num_buckets": 2, "hash_seed": 0},
        {"query_key", "value"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_converted_layer_is_called(name):
    kind, options, read = MODELS[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = get_metis_model(cls(cls.config_class(**options)), MetisConfig(scheme="nvfp4")).train()
    called: set[str] = set()
    layers = dict(metis_layers(model))
    for path, layer in layers.items():
        if ".metis_" not in path:  # experts without a token are not called
            layer.register_forward_hook(lambda *args, path=path: called.add(path))
    if name == "wavlm":
        model(input_values=torch.randn(1, 800))
    else:
        model(input_ids=torch.arange(16)[None], use_cache=False)
    assert called == {path for path in layers if ".metis_" not in path}
    reasons = {
        path.rsplit(".", 1)[1]
        for path, reason in model.metis_report.skipped.items()
        if reason.endswith("reads its weight without calling it")
    }
    assert reasons == read


def test_named_as_a_target():
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**SSM))
    with pytest.raises(ValueError, match=r"dt_proj is a Linear; its owner, a MambaMixer, reads"):
        get_metis_model(model, MetisConfig(target_modules=["in_proj", "dt_proj"]))


def test_bloom_calls_its_layers_otherwise():
    options = {**SIZES, "n_head": 4, "pretraining_tp": 2}
    with torch.device("meta"):
        model = transformers.BloomForCausalLM(transformers.BloomConfig(**options))
    assert set(get_metis_model(model).metis_report.skipped) == {"lm_head"}


def rwkv():
    torch.manual_seed(0)
    options = {**SIZES, "num_hidden_layers": 3, "attention_hidden_size": 64, "rescale_every": 1}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**options))


WRITTEN = {f"rwkv.blocks.{i}.{key}" for i in range(3)
           for key in ("attention.output", "feed_forward.value")}  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
def test_weights_that_their_model_rescales(split):
    """Evaluation divides them in place, which would not reach factors."""
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = rwkv().eval()(ids).logits
        model = get_metis_model(rwkv(), MetisConfig(scheme="bf16", split_weight=split, rank=4))
        logits = model.eval()(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    reasons = model.metis_report.skipped
    assert {name for name in reasons if name != "head"} == (WRITTEN if split else set())
    assert all("overwrites the weight in place" in reasons[name] for name in WRITTEN & set(reasons))


def test_which_of_a_model_are_written_to_follows_the_config():
    pattern = {r"blocks\.0\..*(output|key)": "bf16-split"}
    some = MetisConfig(scheme="nvfp4", scheme_pattern=pattern, rank=4)
    reasons = get_metis_model(rwkv(), some).metis_report.skipped
    assert WRITTEN & set(reasons) == {"rwkv.blocks.0.attention.output"}
    kind, options, _ = MODELS["gemma3n"]
    cls = getattr(transformers, kind)
    with torch.device("meta"):
        model = cls(cls.config_class(**options))
    reasons = get_metis_model(model, MetisConfig(split_weight=True)).metis_report.skipped
    assert "overwrites the weight in place" in reasons["model.layers.0.altup.prediction_coefs"]


def test_written_named_as_a_target():
    config = MetisConfig(scheme="bf16-split", target_modules=["attention.output"], rank=4)
    with pytest.raises(
        ValueError, match=r"attention.output is a Linear; its owner, a Rwkv\w+, overwrites"
    ):
        get_metis_model(rwkv(), config)
