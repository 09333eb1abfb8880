"""Layers that are reported as converted are called; those that are only read stay."""

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
    "falcon-mamba": ("FalconMambaForCausalLM", SSM, {"x_proj", "dt_proj", "out_proj"}),
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
        if reason.endswith("reads its weight and does not call it")
    }
    assert reasons == read


def test_named_as_a_target():
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**SSM))
    with pytest.raises(ValueError, match=r"dt_proj is a Linear; its owner, a MambaMixer, reads"):
        get_metis_model(model, MetisConfig(target_modules=["in_proj", "dt_proj"]))
