"""The conversion report as data."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import gpt2, llama
from native.slow_gemm import SlowGemm
from torch import nn
from training.parallel_cases import wide
from transformers.distributed import DistributedConfig

from conversion.architectures import ARCHITECTURES
from metis_hf import MetisConfig, get_metis_model
from metis_hf.conversion.distributed import cut_layers
from metis_hf.conversion.report import experts_per_token
from metis_hf.numerics.native import use_gemm


def test_layers_that_tensor_parallelism_cuts_are_emulated():
    model = wide()
    model.config.distributed_config = DistributedConfig(tp_size=2)
    with use_gemm(SlowGemm()):
        get_metis_model(model, MetisConfig(scheme="nvidia", backend="auto"))
    assert all(layer.native for layer in model.metis_report.layers)
    cut_layers(model)
    assert "FP4 units: " not in str(model.metis_report)
    (line,) = [line for line in str(model.metis_report).splitlines() if "emulated" in line]
    assert line.startswith("  GEMMs emulated in 14 layers: tensor parallelism shards them")


def test_is_data_for_programs():
    config = MetisConfig(rank=4, scheme_pattern={"down_proj": "bf16"}, keep_last_blocks=1)
    model = llama()
    total = sum(param.numel() for param in model.parameters())
    report = get_metis_model(model, config).metis_report
    data = json.loads(json.dumps(report.to_dict()))
    assert data["scheme"] == "metis"
    assert data["total_params"] == total
    assert len(data["layers"]) == len(report.layers) == 7
    down = next(layer for layer in data["layers"] if layer["name"].endswith("down_proj"))
    assert down["kind"] == "Linear"
    assert (down["in_features"], down["out_features"], down["params"]) == (96, 64, 96 * 64)
    assert (down["scheme"], down["rank"]) == ("bf16", None)
    query = next(layer for layer in data["layers"] if layer["name"].endswith("q_proj"))
    assert (query["scheme"], query["rank"]) == ("metis", 4)
    assert data["converted_params"] == sum(layer["params"] for layer in data["layers"])
    reasons = {item["name"]: item["reason"] for item in data["skipped"]}
    assert reasons == report.skipped
    assert reasons["model.layers.1.mlp.up_proj"] == "keep_last_blocks=1"
    assert 0 < data["flops_share"] < 1
    assert report.ranks == {4: 6}
    assert report.other_schemes == {"bf16": 1}
    assert report.skipped_by_reason()["output head"] == ["lm_head"]


def test_kinds():
    (kind,) = {layer.kind for layer in get_metis_model(gpt2()).metis_report.layers}
    assert kind == "Conv1D"
    model = get_metis_model(ARCHITECTURES["mixtral"].build())
    kinds = {layer.kind for layer in model.metis_report.layers if ".experts." in layer.name}
    assert kinds == {"expert"}


@pytest.mark.parametrize("split", [False, True])
def test_text(split):
    model = get_metis_model(llama(), MetisConfig(split_weight=split))
    text, later = str(model.metis_report), model.metis_report.text(error=False)
    assert "14 layers converted" in text
    assert "output head): lm_head" in text
    assert ("rank 32 (14 layers)" if split else "rank 32 (4 layers), 48 (10 layers)") in text
    assert ("split reproduces the weights to" in text) == split
    assert "split reproduces" not in later  # true at conversion alone
    assert ("rank 32 (14 layers)" in later) == split
    # 4.5 bits for a weight; for its share of the factors too, plus s: k = 32 of a 64 x 64 layer.
    layer = next(x for x in model.metis_report.layers if x.in_features == x.out_features == 64)
    assert layer.bits_per_weight == pytest.approx(4.5 * 2 + 0.25 if split else 4.5)
    assert layer.error < 1e-6
    assert (layer.error > 0) == split


def test_tied_parameters_count_once_on_every_device():
    model = llama(tie_word_embeddings=True)
    total = sum(param.numel() for param in model.parameters())
    with torch.device("meta"):
        empty = llama(tie_word_embeddings=True)
    for each in (model, empty):
        assert get_metis_model(each).metis_report.total_params == total


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}  # fmt: skip
LLAMA4 = {
    **SIZES, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
    "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "image_size": 16,
          "num_attention_heads": 4, "patch_size": 8, "vision_output_dim": 64,
          "projector_input_dim": 64, "projector_output_dim": 64}  # fmt: skip


@pytest.mark.parametrize("composite", [False, True])
def test_share_counts_experts_that_are_not_converted(composite):
    """Llama 4's are unknown to transformers' experts interface, and say how many they are."""
    with torch.device("meta"):
        if composite:
            config = transformers.Llama4Config(text_config=LLAMA4, vision_config=VISION)
            model = transformers.Llama4ForConditionalGeneration(config)
        else:
            model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**LLAMA4))
    report = get_metis_model(model, MetisConfig(scheme="bf16")).metis_report
    assert sum("3-D parameter of Llama4TextExperts" in why for why in report.skipped.values()) == 2
    assert report.uncounted == ()
    assert "uncounted" not in report.to_dict()
    experts = 2 * (64 * 2 * 96 + 96 * 64)  # of two experts each
    other = {name: layer for name, layer in model.named_modules() if name in report.skipped}
    rest = sum(layer.weight.numel() for layer in other.values())
    share = report.converted_params / (report.converted_params + rest + experts)
    assert report.flops_share == pytest.approx(share)


@pytest.mark.parametrize(("visited", "expected"), [(8, 8), ([8, 8], 8), ([1, 2, 2], 2), ([], 1)])
def test_experts_per_token(visited, expected):
    """HunYuan's config may have a number for each layer."""
    config = transformers.HunYuanMoEV1Config(num_experts=8, moe_topk=visited)
    assert experts_per_token(config) == expected


def test_share_names_what_it_leaves_out():
    """DBRX has the matrices of all experts below one another."""
    config = transformers.DbrxConfig(
        d_model=64, n_heads=4, n_layers=1, vocab_size=64, max_seq_len=32,
        attn_config={"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.DbrxForCausalLM(config)
    report = get_metis_model(model, MetisConfig(scheme="bf16")).metis_report
    experts = {name for name in report.skipped if ".experts.mlp." in name}
    assert {name.rsplit(".", 1)[1] for name in experts} == {"w1", "v1", "w2"}
    assert set(report.uncounted) == experts
    assert report.to_dict()["uncounted"] == list(report.uncounted)
    assert "of GEMM FLOPs (excluding 3 unknown parameters)" in str(report)


def test_convolutions_under_a_weight_norm_are_no_experts():
    config = transformers.Wav2Vec2Config(
        **{**SIZES, "conv_dim": (32,), "conv_stride": (5,), "conv_kernel": (10,)},
        num_feat_extract_layers=1, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    report = get_metis_model(transformers.Wav2Vec2Model(config), MetisConfig()).metis_report
    assert not any("parametrizations" in name for name in report.skipped)
    assert report.uncounted == ()


class NormHead(nn.Module):
    """An output head of one's own."""

    def __init__(self, name="weight"):
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.randn(256, 64) * 0.02))

    def forward(self, hidden):
        return F.linear(hidden, F.normalize(self.get_parameter(self.name)))


class Positions(nn.Module):
    """A block with a table beside its matrices."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)
        self.up = nn.Linear(64, 96)
        self.positions = nn.Parameter(torch.zeros(16, 64))
        self.tokens = nn.Embedding(16, 64)


@pytest.mark.parametrize("name", ["weight", "W_out", "prototypes"])
def test_a_head_of_one_s_own_is_listed_and_counted(name):
    plain = get_metis_model(llama()).metis_report
    model = llama()
    model.lm_head = NormHead(name)
    report = get_metis_model(model, MetisConfig()).metis_report
    reason = "2-D parameter of NormHead, not a linear layer"
    assert report.skipped == {f"lm_head.{name}": reason}
    assert f"kept in high precision ({reason}): lm_head.{name}" in str(report)
    assert report.flops_share == plain.flops_share < 1
    assert report.uncounted == ()


def test_matrices_are_listed_and_tables_are_not():
    config = MetisConfig(scheme="nvfp4", target_modules="all-linear")
    report = get_metis_model(Positions(), config).metis_report
    assert set(report.skipped) == {"attention.in_proj_weight", "attention.out_proj"}
    assert report.flops_share == pytest.approx(64 * 96 / (64 * 96 + 4 * 64 * 64))
