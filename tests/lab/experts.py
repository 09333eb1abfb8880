"""A small model with fused experts, for tests of the lab."""

from __future__ import annotations

import transformers


def mixtral(experts: int, vocab: int = 97, **changes) -> transformers.MixtralForCausalLM:
    config = transformers.MixtralConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=experts, **changes,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)
