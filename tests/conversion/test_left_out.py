"""What stays as it is, wherever a model has it: heads, routers, blocks at the ends."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from conversion.selection_tools import SIZES, TEXT, composite, on_meta, selected, skipped

BOTH = {
    "vision_config": {**SIZES, "intermediate_size": 96, "image_size": 16, "patch_size": 4},
    "text_config": TEXT,
}
T5 = {"vocab_size": 64, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 1, "num_heads": 4}
WHISPER = {
    "vocab_size": 64, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "num_mel_bins": 8, "max_source_positions": 16, "pad_token_id": 0,
}  # fmt: skip


def musicgen() -> transformers.PreTrainedModel:
    """Its codec is no matter here."""
    config = transformers.MusicgenConfig(
        text_encoder={**T5, "model_type": "t5"},
        decoder={"model_type": "musicgen_decoder", "vocab_size": 64, "hidden_size": 64,
                 "num_hidden_layers": 1, "ffn_dim": 96, "num_attention_heads": 4},
        audio_encoder={"model_type": "encodec"},
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.MusicgenForConditionalGeneration(config)


def left_out(model: nn.Module, reason: str = "output head") -> set[str]:
    return {name for name, why in skipped(model).items() if why == reason}


HEADS = {
    "siglip": (lambda: on_meta("SiglipForImageClassification", **BOTH), {"classifier"}),
    "clip": (lambda: on_meta("CLIPForImageClassification", **BOTH), {"classifier"}),
    "t5": (lambda: on_meta("T5ForQuestionAnswering", **T5), {"qa_outputs"}),
    "whisper": (
        lambda: on_meta("WhisperForAudioClassification", **WHISPER),
        {"projector", "classifier"},
    ),
    "bert in a composite": (
        lambda: composite("BertConfig", **TEXT),
        {"decoder.cls.predictions.transform.dense"},
    ),
    "a list of heads": (musicgen, {f"decoder.lm_heads.{index}" for index in range(4)}),
    "a model inside a module": (
        lambda: nn.Sequential(on_meta("LlamaForCausalLM", **TEXT)),
        {"0.lm_head"},
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name):
    build, heads = HEADS[name]
    assert left_out(build()) == heads


@pytest.mark.parametrize(
    ("kind", "options", "stays"),
    [
        ("CLIPModel", BOTH, {"visual_projection", "text_projection"}),
        ("CLIPForImageClassification", BOTH, {"vision_model.encoder.layers.0.mlp.fc1"}),
        ("WhisperForConditionalGeneration", WHISPER, {"model.encoder.layers.0.fc1"}),
    ],
)
def test_what_is_no_head(kind, options, stays):
    """Linear layers at the top of a model without a task, and everything in a base."""
    assert stays <= selected(on_meta(kind, **options))


def test_a_router_by_its_own_name():
    options = {**TEXT, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}
    model = on_meta("DogeForCausalLM", **options)
    assert left_out(model, "router") == {"model.layers.0.mlp.router_gate"}


@pytest.mark.parametrize("kind", [nn.Sequential, lambda *blocks: nn.ModuleList(blocks)])
def test_blocks_of_a_model_that_is_the_list(kind):
    model = kind(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(3)))
    options = {"keep_first_blocks": 1, "keep_last_blocks": 1}
    assert selected(model, **options) == {"1.0"}
    assert skipped(model, **options) == {"0.0": "keep_first_blocks=1", "2.0": "keep_last_blocks=1"}
