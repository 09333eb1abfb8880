"""Every language model of transformers that can be made tiny: converted, trained, reloaded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from metis_hf import MetisConfig, get_metis_model, metis_layers

AUTO = {
    transformers.AutoModelForCausalLM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    transformers.AutoModelForSeq2SeqLM: modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    transformers.AutoModelForMaskedLM: modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
}
FAMILIES = {  # by config class, each under the first head that it has
    config: auto for auto, mapping in reversed(AUTO.items()) for config in mapping
}
FEWEST = 170  # families that must have passed; the others cannot be made tiny by these sizes
NO_LINEAR = {"ibert"}  # has linear layers of a custom class only
LARGEST = 20_000_000  # parameters
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size"), 64
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "head_dim", "v_head_dim", "d_kv"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_window"), 16),
    "vocab_size": 128,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
passed: list[str] = []


def layer_types(config: Any) -> dict[str, list[str]]:
    """Two layers: the first, and the first full attention if there is any."""
    found = {}
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        types = list(getattr(config, name, None) or [])
        if types:
            full = [kind for kind in types if "full_attention" in kind]
            found[name] = [types[0], full[0] if full else types[min(1, len(types) - 1)]]
    return found


def options_of(base: Any, types: bool, heads: bool) -> dict[str, Any]:
    """Sizes that the config knows, with `layer_types`, and with widths of heads."""
    options = {name: size for name, size in SIZES.items() if hasattr(base, name)}
    if "qk_rope_head_dim" in options:
        options["head_dim"] = options["qk_rope_head_dim"]
    if base.is_encoder_decoder:
        options["decoder_start_token_id"] = 1
    if not heads:
        options = {name: size for name, size in options.items() if "head_dim" not in name}
    return options | (layer_types(base) if types else {})


def tiny(config_class: type, auto: Any) -> nn.Module:
    """Build the model at `SIZES`; several ways, since configs check them against each other."""
    errors: list[Exception] = []
    for types, heads in itertools.product((True, False), repeat=2):
        try:
            config = config_class(**options_of(config_class(), types, heads))
            with torch.device("meta"):
                whole = auto.from_config(config, dtype=torch.float32)
            if sum(param.numel() for param in whole.parameters()) > LARGEST:
                raise ValueError("too large")
            torch.manual_seed(0)
            model = auto.from_config(config, dtype=torch.float32).train()
            loss_of(model).backward()
        except Exception as error:
            errors.append(error)
        else:
            return model
    pytest.skip(f"transformers does not run it at this size: {errors[0]!r:.200}")


def loss_of(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    ids = torch.randint(3, 120, (2, 16))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def logits_of(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(2)
    ids = torch.randint(3, 120, (2, 16))
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids, **extra).logits
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("config_class", FAMILIES, ids=lambda kind: kind.model_type)
def test_a_family_is_converted_trained_and_reloaded(config_class, tmp_path) -> None:
    auto = FAMILIES[config_class]
    if config_class.model_type in NO_LINEAR:
        pytest.skip("no nn.Linear but the head")
    model = tiny(config_class, auto)
    idle = {name for name, param in model.named_parameters() if param.grad is None}
    model.zero_grad()
    metis = get_metis_model(model, MetisConfig(scheme="metis"))
    report = metis.metis_report
    converted = dict(metis_layers(metis))
    assert converted
    left = {name for name, module in metis.named_modules() if type(module) is nn.Linear}
    assert left <= report.skipped.keys()
    loss_of(metis.train()).backward()
    for name, param in metis.named_parameters():
        assert param.grad is None or param.grad.isfinite().all(), name
    layers = converted.items()
    untrained = {f"{name}.weight" for name, layer in layers if layer.weight.grad is None}
    assert {name for name in untrained if "expert" not in name} <= idle  # no token chose these
    metis.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path, dtype=torch.float32)
    assert again.metis_report.layers == report.layers
    assert torch.equal(logits_of(again), logits_of(metis))
    passed.append(config_class.model_type)


@pytest.mark.slow
def test_most_families_took_part() -> None:
    """Runs last, in the same process as all other tests of this file."""
    assert len(passed) >= FEWEST
