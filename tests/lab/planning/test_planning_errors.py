"""Models that a plan of a run refuses by name."""

from __future__ import annotations

import dataclasses

import pytest
import transformers

from metis_hf import MetisConfig
from metis_hf.lab.planning.plan import (
    plan_run,
)
from metis_hf.lab.planning.workload import Workload

LOAD = Workload(tokens=10_000, sequence_length=64, global_batch=16, device_batch=2, world_size=4)


def test_a_model_of_several_modalities_is_refused_by_name():
    config = transformers.Gemma3Config()
    with pytest.raises(ValueError, match=r"gemma3 has a text model among others; plan that one"):
        plan_run(config, MetisConfig(), LOAD)


def test_models_that_cannot_be_planned_are_refused():
    t5 = transformers.T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16)
    with pytest.raises(ValueError, match="encoder-decoder"):
        plan_run(t5, MetisConfig(), LOAD)
    mixtral = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="fused experts"):
        plan_run(mixtral, MetisConfig(), LOAD)
    # Outside of the experts interface.
    llama4 = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_local_experts=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="fused experts"):
        plan_run(llama4, MetisConfig(scheme="nvfp4"), LOAD)
    jetmoe = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_key_value_heads=1, kv_channels=16, num_local_experts=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="fused experts"):
        plan_run(jetmoe, MetisConfig(scheme="nvfp4"), LOAD)
    dbrx = transformers.DbrxConfig(
        d_model=32, n_heads=2, n_layers=1, vocab_size=64, max_seq_len=32,
        attn_config={"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 2, "hidden_size": 32},
    )  # fmt: skip
    with pytest.raises(ValueError, match="fused experts"):
        plan_run(dbrx, MetisConfig(scheme="nvfp4"), LOAD)
    biogpt = transformers.BioGptConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    load = dataclasses.replace(LOAD, checkpointing=True)
    with pytest.raises(ValueError, match=r"BioGptForCausalLM does not say which .* are blocks"):
        plan_run(biogpt, MetisConfig(scheme="nvfp4"), load)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Mamba", "no attention heads"),
        ("Bamba", "linear_attention|mamba"),
        ("Zamba2", "hybrid"),
        ("FalconH1", "hybrid"),
        ("Jamba", "linear_attention|mamba"),
        ("Qwen3Next", "linear_attention"),
    ],
)
def test_layers_other_than_attention_are_refused(name, layers):
    """Their FLOPs are not those of attention, and the config alone tells."""
    config = getattr(transformers, f"{name}Config")()
    match = rf"has .*({layers}).*; plans are for dense decoders of attention alone"
    with pytest.raises(ValueError, match=match):
        plan_run(config, MetisConfig(), LOAD)
