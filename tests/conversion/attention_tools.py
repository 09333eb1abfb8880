"""Models whose attention is quantized, for tests."""

from __future__ import annotations

import torch
import transformers
from conftest import VOCAB, llama

from metis_hf import (
    MetisConfig,
    get_metis_model,
)
from metis_hf.conversion.attention import attention_products
from metis_hf.schemes import Scheme

CONFIG = MetisConfig(scheme="bf16", attention="nvfp4-rne")
SLIDING = {"sliding_window": 7, "attention_dropout": 0.0}


def small(model: str, **changes):
    options = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    kind = getattr(transformers, f"{model}ForCausalLM")
    return kind(kind.config_class(**options | changes))


def converted(model=None, config=CONFIG):
    return get_metis_model(llama() if model is None else model, config)


def left_padded(ids):
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def with_exact_operands(model) -> None:
    """Let attention compute its products by itself, of operands that are not quantized."""
    for _, products in attention_products(model):
        scheme = Scheme()
        object.__setattr__(scheme, "is_high_precision", False)  # else the model's own runs
        products.scheme = products.eval_scheme = scheme


def results(model, batch) -> list[torch.Tensor]:
    """Loss and all gradients, of experts that are layers or slices left out."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(named) > 10
    return [loss.detach(), *(grad for name, grad in named.items() if "expert" not in name)]
