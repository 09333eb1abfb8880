"""Tiny models of the architectures that the suite runs, built from configs, with what is expected.

Each entry of `ARCHITECTURES` says how to build the model, what to feed it, which layers conversion
takes and which it leaves, with the reason. Nothing is downloaded. Dropout is off everywhere, so
that two passes over the same data can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 128
HIDDEN = 64
INNER = 96
LAYERS = 2
EXPERTS = 4
LENGTH = 24
LABELS = 5

# transformers' names for the same sizes.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
GROUPED = COMMON | {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NARROW_EXPERTS = {"moe_intermediate_size": 48, "num_experts": EXPERTS, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Architecture:
    """One entry of the suite.

    Args:
        build: makes the model, with the weights that the current seed gives.
        auto: the class whose from_pretrained loads it.
        batch: () -> keyword arguments of the model, labels included.
        converted: last part of a converted name -> how often it occurs; fused experts count once
            for each expert.
        skipped: name -> reason, of everything that looks convertible and stays.
        share: least share of the parameters that are converted. The models are tiny, so their
            embeddings weigh more than in real ones.
        generates: whether `generate` is tried.
        mixture: whether it has fused experts, whose outputs may be summed in another order.
    """

    build: Callable[[], transformers.PreTrainedModel]
    auto: type
    batch: Callable[[], dict[str, Tensor]]
    converted: Mapping[str, int]
    skipped: Mapping[str, str] = field(default_factory=dict)
    share: float = 0.5
    generates: bool = True
    mixture: bool = False


def tokens(rows: int = 4, seed: int = 1) -> Tensor:
    """Token ids [rows, LENGTH] without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)


def causal_batch() -> dict[str, Tensor]:
    """Padded rows on the right; padding counts in no loss."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, LENGTH - 5 :] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def seq2seq_batch() -> dict[str, Tensor]:
    """A source and a shorter target."""
    source = causal_batch()
    del source["labels"]
    return source | {"labels": tokens(seed=2)[:, :10].contiguous()}


def class_batch() -> dict[str, Tensor]:
    """A label for each row."""
    source = causal_batch()
    return source | {"labels": torch.tensor([0, 1, 2, 3])}


def image_batch() -> dict[str, Tensor]:
    """Four images of 16 x 16 pixels, a label for each."""
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}


def causal(
    model: str,
    options: Mapping[str, Any],
    converted: str,
    skipped: Mapping[str, str],
    **changes: Any,
) -> Architecture:
    """A decoder of transformers: `<model>ForCausalLM`, or the class of that very name.

    Args:
        converted: names of the layers that every block has once.
    """
    name = model if hasattr(transformers, model) else f"{model}ForCausalLM"
    return Architecture(
        build=partial(build_model, name, options),
        auto=transformers.AutoModelForCausalLM,
        batch=causal_batch,
        converted=_blocks(converted) | changes.pop("experts", {}),
        skipped=skipped,
        **changes,
    )


def build_model(name: str, options: Mapping[str, Any]) -> transformers.PreTrainedModel:
    model = getattr(transformers, name)
    return model(model.config_class(**options))


def _blocks(names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), LAYERS)


def _routers(path: str) -> dict[str, str]:
    return {path.format(index): "router" for index in range(LAYERS)}


ATTENTION = "q_proj k_proj v_proj o_proj"
GATED_MLP = "gate_proj up_proj down_proj"
LLAMA = f"{ATTENTION} {GATED_MLP}"
HEAD = {"lm_head": "output head"}
TIED_HEAD = {"lm_head": "weight tied to model.embed_tokens"}
FUSED_EXPERTS = {"gate_up_proj": LAYERS * EXPERTS, "down_proj": LAYERS * EXPERTS}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": causal("Llama", GROUPED, LLAMA, HEAD),
    "llama-tied": causal("Llama", GROUPED | {"tie_word_embeddings": True}, LLAMA, TIED_HEAD),
    "gpt2": causal(
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        "c_attn c_fc",
        {"lm_head": "weight tied to transformer.wte"},
        experts={"c_proj": 2 * LAYERS},  # of the attention and of the MLP
    ),
    "qwen2": causal("Qwen2", GROUPED, LLAMA, HEAD),
    "qwen3": causal("Qwen3", GROUPED | {"head_dim": 16}, LLAMA, HEAD),
    "gemma": causal("Gemma", GROUPED | {"head_dim": 16}, LLAMA, TIED_HEAD),
    "gemma2": causal("Gemma2", GROUPED | {"head_dim": 16}, LLAMA, TIED_HEAD),
    "gemma3": causal("Gemma3", GROUPED | {"head_dim": 16}, LLAMA, TIED_HEAD),
    "mistral": causal("Mistral", GROUPED | {"head_dim": 16}, LLAMA, HEAD),
    "phi3": causal(
        "Phi3",
        GROUPED | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "qkv_proj o_proj gate_up_proj down_proj",
        HEAD,
    ),
    "opt": causal(
        "OPT",
        {key: value for key, value in COMMON.items() if key != "intermediate_size"}
        | {"ffn_dim": INNER, "dropout": 0.0, "word_embed_proj_dim": HIDDEN},
        "q_proj k_proj v_proj out_proj fc1 fc2",
        {"lm_head": "weight tied to model.decoder.embed_tokens"},
    ),
    "gpt-neox": causal(
        "GPTNeoX",
        COMMON | {"hidden_dropout": 0.0},
        "query_key_value dense dense_h_to_4h dense_4h_to_h",
        HEAD,
    ),
    "mixtral": causal(
        "Mixtral",
        GROUPED | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        ATTENTION,
        HEAD | _routers("model.layers.{}.mlp.gate.weight"),
        experts=FUSED_EXPERTS,
        mixture=True,
    ),
    "qwen2-moe": causal(
        "Qwen2Moe",
        GROUPED | NARROW_EXPERTS | {"shared_expert_intermediate_size": 48},
        f"{ATTENTION} gate_proj up_proj",
        HEAD
        | _routers("model.layers.{}.mlp.gate.weight")
        | _routers("model.layers.{}.mlp.shared_expert_gate"),
        experts=FUSED_EXPERTS | {"down_proj": LAYERS * (EXPERTS + 1)},  # and the shared expert's
        mixture=True,
    ),
    "qwen3-moe": causal(
        "Qwen3Moe",
        GROUPED | NARROW_EXPERTS | {"head_dim": 16},
        ATTENTION,
        HEAD | _routers("model.layers.{}.mlp.gate.weight"),
        experts=FUSED_EXPERTS,
        mixture=True,
    ),
    "gpt-oss": causal(
        "GptOss",
        GROUPED
        | {
            "head_dim": 16,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        ATTENTION,
        HEAD | _routers("model.layers.{}.mlp.router.weight"),
        experts=FUSED_EXPERTS,
        mixture=True,
    ),
    "t5": Architecture(
        build=partial(
            build_model,
            "T5ForConditionalGeneration",
            {
                "vocab_size": VOCAB,
                "d_model": HIDDEN,
                "d_ff": INNER,
                "d_kv": 16,
                "num_layers": LAYERS,
                "num_heads": 4,
                "dropout_rate": 0.0,
                "decoder_start_token_id": 0,
            },
        ),
        auto=transformers.AutoModelForSeq2SeqLM,
        batch=seq2seq_batch,
        # Self-attention of encoder and decoder, and cross-attention; an MLP in each.
        converted=dict.fromkeys("qkvo", 3 * LAYERS) | {"wi": 2 * LAYERS, "wo": 2 * LAYERS},
        skipped={"lm_head": "weight tied to shared"},
    ),
    "bert-masked": Architecture(
        build=partial(build_model, "BertForMaskedLM", COMMON | NO_DROPOUT),
        auto=transformers.AutoModelForMaskedLM,
        batch=causal_batch,
        converted=_blocks("query key value") | {"dense": 3 * LAYERS},
        skipped={
            "cls.predictions.transform.dense": "output head",
            "cls.predictions.decoder": "weight tied to bert.embeddings.word_embeddings",
        },
        generates=False,
    ),
    "bert-classes": Architecture(
        build=partial(
            build_model,
            "BertForSequenceClassification",
            COMMON | NO_DROPOUT | {"num_labels": LABELS},
        ),
        auto=transformers.AutoModelForSequenceClassification,
        batch=class_batch,
        # The pooler belongs to the body.
        converted=_blocks("query key value") | {"dense": 3 * LAYERS + 1},
        skipped={"classifier": "output head"},
        generates=False,
    ),
    "vit": Architecture(
        build=partial(
            build_model,
            "ViTForImageClassification",
            {
                "image_size": 16,
                "patch_size": 4,
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 4,
                "num_labels": LABELS,
                **NO_DROPOUT,
            },
        ),
        auto=transformers.AutoModelForImageClassification,
        batch=image_batch,
        converted=_blocks(f"{ATTENTION} fc1 fc2"),
        skipped={"classifier": "output head"},
        generates=False,
    ),
}
