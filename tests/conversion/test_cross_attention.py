"""The masks of keys and values of a decoder's attention to the encoder's output."""

from __future__ import annotations

import pytest

from conversion.selection_tools import SIZES, composite, on_meta
from metis_hf import MetisConfig, get_metis_model

GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4}
CROSS = {
    "NLLB-MoE": (
        lambda: on_meta(
            "NllbMoeForConditionalGeneration", vocab_size=64, d_model=64, encoder_layers=1,
            decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=96, decoder_ffn_dim=96, num_experts=2),
        "cross_attention.{}", "k_proj v_proj", "q_proj out_proj",
    ),
    "ProphetNet": (
        lambda: on_meta(
            "ProphetNetForConditionalGeneration", vocab_size=64, hidden_size=64,
            encoder_ffn_dim=96, decoder_ffn_dim=96, num_encoder_layers=1, num_decoder_layers=1,
            num_encoder_attention_heads=4, num_decoder_attention_heads=4),
        "cross_attn.{}", "key_proj value_proj", "query_proj out_proj",
    ),
    "GPT-2": (
        lambda: composite("GPT2Config", **GPT2), "crossattention.{}", "c_attn", "q_attn c_proj",
    ),
    "GPTBigCode": (
        lambda: composite("GPTBigCodeConfig", multi_query=False, **GPT2),
        "crossattention.{}", "c_attn", "q_attn c_proj",
    ),
    "Pix2Struct": (
        lambda: on_meta(
            "Pix2StructForConditionalGeneration",
            text_config={"vocab_size": 64, "hidden_size": 64, "d_kv": 16, "d_ff": 96,
                         "num_layers": 1, "num_heads": 4},
            vision_config={**SIZES, "d_kv": 16, "d_ff": 96}),
        "encoder_decoder_attention.attention.{}", "key value", "query output",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CROSS)
def test_what_reads_the_encoder_has_the_encoders_mask(name):
    build, where, read, written = CROSS[name]
    model = get_metis_model(build(), MetisConfig(scheme="bf16"))
    masks = {
        path: module.token_mask.argument
        for path, module in model.named_modules()
        if hasattr(module, "token_mask")
    }
    for keys, mask in ((read, "attention_mask"), (written, "decoder_attention_mask")):
        for key in keys.split():
            found = [masks[path] for path in masks if path.endswith(where.format(key))]
            assert found == [mask], key


def test_what_reads_the_encoder_and_the_decoder_has_no_mask():
    """T5Gemma 2 calls one layer on the rows of both, and they may be equally many."""
    text = {
        **SIZES, "vocab_size": 64, "intermediate_size": 96, "num_key_value_heads": 2,
        "head_dim": 16,
    }  # fmt: skip
    vision = {**SIZES, "intermediate_size": 96, "image_size": 28, "patch_size": 14}
    encoder = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    model = get_metis_model(
        on_meta(
            "T5Gemma2ForConditionalGeneration", encoder=encoder, decoder=text,
            image_token_index=60, eoi_token_index=61,
        ),
        MetisConfig(scheme="bf16"),
    )  # fmt: skip
    attention = "decoder.layers.0.self_attn"
    masks = {
        path.rpartition(".")[2]: module.token_mask and module.token_mask.argument
        for path, module in model.named_modules()
        if hasattr(module, "token_mask") and attention in path
    }
    assert masks == {
        "q_proj": "decoder_attention_mask",
        "k_proj": None,
        "v_proj": None,
        "o_proj": "decoder_attention_mask",
    }
