"""Tensor scales of layers that engines run as one, in exports of weights alone."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import bert, llama
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from deploy.checkpoints import ALL_SPLIT, checkpoint, w_hat
from metis_hf import MetisConfig, calibrate, get_metis_model, metis_layers
from metis_hf.deploy import export_checkpoint, load_low_rank, load_metis_model
from metis_hf.deploy.compressed_tensors import CompressedMatrix
from metis_hf.deploy.fused import OWN_SCALES, SHARED_SCALES
from metis_hf.numerics import fake_quantize

JOINED = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("mlp", ("gate_proj", "up_proj")),
)


def joined_as_vllm_does(state, names):
    """The rows that vLLM computes with: all blocks, and the largest encode scale for all."""
    packed, scale = (
        torch.cat([state[f"{name}.weight_{part}"].view(torch.uint8) for name in names])
        for part in ("packed", "scale")
    )
    largest = torch.cat([state[f"{name}.weight_global_scale"] for name in names]).max()
    columns = 2 * packed.shape[1]
    whole = CompressedMatrix(packed, scale.view(torch.float8_e4m3fn), largest[None], columns)
    return whole.dequantize()


def represented(layers, name):
    layer = layers[name]
    return layer.weight_form.dense(layer.weight_params()).detach()


def groups(state):
    for block in range(2):
        for parent, names in JOINED:
            yield [f"model.layers.{block}.{parent}.{name}" for name in names]


@pytest.mark.parametrize(
    ("config", "rule"),
    [({"scheme": "metis"}, "search"), ({"scheme": "nvfp4-rne"}, "absmax"), (ALL_SPLIT, "search")],
    ids=["metis", "nvfp4-rne", "folded"],
)
def test_an_engine_that_joins_layers_reads_the_weights(config, rule, tmp_path):
    source = checkpoint(tmp_path / "metis", **config)
    report = export_checkpoint(source, tmp_path / "out", format="compressed-tensors")
    state = load_file(tmp_path / "out/model.safetensors")
    layers = dict(metis_layers(load_metis_model(source)))
    for names in groups(state):
        weights = [represented(layers, name) for name in names]
        amax = max(weight.abs().max() for weight in weights)
        expected = [fake_quantize(weight, scale_rule=rule, amax=amax) for weight in weights]
        assert torch.equal(joined_as_vllm_does(state, names), torch.cat(expected))
    for own in ("self_attn.o_proj", "mlp.down_proj"):  # alone, and under their own scale
        name = f"model.layers.0.{own}"
        expected = fake_quantize(represented(layers, name), scale_rule=rule)
        assert torch.equal(joined_as_vllm_does(state, [name]), expected)
    assert report.notes == (() if config is ALL_SPLIT else (SHARED_SCALES,))


@pytest.mark.parametrize(
    "config",
    [
        {"scheme": "metis", "scheme_pattern": {"v_proj": "nvfp4-rne", "up_proj": "nvfp4-rne"}},
        {"scheme": "w4a16", "scheme_pattern": {"k_proj": "nvfp4-rne", "gate_proj": "metis"}},
    ],
    ids=["scale rules", "some calibrated"],
)
def test_one_scale_whatever_the_schemes(config, tmp_path):
    """An amax gives another scale by each rule, and calibrated layers have amaxes of their own."""
    model = get_metis_model(llama(), MetisConfig(**config))
    if config["scheme"] == "w4a16":
        calibrate(model, [torch.arange(32).reshape(2, 16)])
    model.save_pretrained(tmp_path / "metis")
    report = export_checkpoint(tmp_path / "metis", tmp_path / "out", format="compressed-tensors")
    state = load_file(tmp_path / "out/model.safetensors")
    layers = dict(metis_layers(model))
    for names in groups(state):
        assert len({state[f"{name}.weight_global_scale"].item() for name in names}) == 1
        whole = torch.cat([represented(layers, name) for name in names])
        found = joined_as_vllm_does(state, names)
        assert float((found - whole).norm() / whole.norm()) < 0.12
    assert report.notes == (SHARED_SCALES,)


def test_own_scales_are_those_of_training_and_are_said_to_be(tmp_path):
    source = checkpoint(tmp_path / "metis", scheme="metis")
    report = export_checkpoint(
        source, tmp_path / "out", format="compressed-tensors", share_scales=False
    )
    state = load_file(tmp_path / "out/model.safetensors")
    layers = dict(metis_layers(load_metis_model(source)))
    for names in groups(state):
        trained = [w_hat(layers[name]) for name in names]
        for name, expected in zip(names, trained):
            assert torch.equal(joined_as_vllm_does(state, [name]), expected)
        assert not torch.allclose(joined_as_vllm_does(state, names), torch.cat(trained), rtol=1e-2)
    assert report.notes == (OWN_SCALES,)
    assert OWN_SCALES in ModelCard.load(tmp_path / "out/README.md").text
    assert json.loads((tmp_path / "out/metis_export.json").read_text())["notes"] == [OWN_SCALES]


@pytest.mark.parametrize("equal", [False, True])
def test_nothing_to_say(equal, tmp_path):
    """Without tensor scales there are none to share; nor are they where training had one value."""
    model = llama()
    for name, param in model.named_parameters():
        if equal and name.endswith("proj.weight"):
            param.data.clamp_(-0.02, 0.02)
            param.data[0, 0] = 0.02
    config = MetisConfig(scheme="metis", two_level=equal)
    get_metis_model(model, config).save_pretrained(tmp_path / "metis")
    report = export_checkpoint(tmp_path / "metis", tmp_path / "out", format="compressed-tensors")
    assert report.notes == ()


@pytest.mark.parametrize("larger", ["k_proj", "q_proj"])
def test_the_one_scale_holds_the_largest_weight(larger, tmp_path):
    """Of several it is the smallest, an encode scale: another would cut weights off."""
    model = llama()
    getattr(model.model.layers[0].self_attn, larger).weight.data.mul_(8)
    config = MetisConfig(scheme="w4a4", scheme_pattern={"k_proj": "nvfp4-rne"})
    calibrate(get_metis_model(model, config), [torch.arange(32).reshape(2, 16)])
    model.save_pretrained(tmp_path / "metis")
    export_checkpoint(tmp_path / "metis", tmp_path / "out", format="compressed-tensors")
    state, layers = load_file(tmp_path / "out/model.safetensors"), dict(metis_layers(model))
    names = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    whole = torch.cat([layers[name].weight for name in names]).detach()
    found = joined_as_vllm_does(state, names)
    assert float((found - whole).norm() / whole.norm()) < 0.12  # cut at an eighth: .5 and more


def qwen3_5():
    return transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_key_head_dim=16,
            linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
            layer_types=["linear_attention"],
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "parent", "joined"),
    [
        (qwen3_5, "linear_attn", ("in_proj_qkv", "in_proj_z")),
        (qwen3_5, "linear_attn", ("in_proj_b", "in_proj_a")),
        (bert, "attention.self", ("query", "key", "value")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_other_layers_that_engines_join(build, parent, joined, tmp_path):
    model = build()
    for name, param in model.named_parameters():
        if name.endswith(f"{joined[-1]}.weight"):
            param.data.mul_(4)
    get_metis_model(model, MetisConfig(scheme="nvfp4-rne")).save_pretrained(tmp_path / "metis")
    report = export_checkpoint(tmp_path / "metis", tmp_path / "out", format="compressed-tensors")
    state, layers = load_file(tmp_path / "out/model.safetensors"), dict(metis_layers(model))
    names = [name for own in joined for name in layers if name.endswith(f"0.{parent}.{own}")]
    assert len(names) == len(joined)
    whole = torch.cat([layers[name].weight for name in names]).detach()
    found = joined_as_vllm_does(state, names)
    assert float((found - whole).norm() / whole.norm()) < 0.12  # under their own scales: .7
    assert report.notes == (SHARED_SCALES,)


@pytest.mark.parametrize(
    ("layout", "config", "said"),
    [
        (
            "compressed-tensors",
            {"scheme": "w4a4", "scheme_pattern": {"k_proj": "w4a16"}},
            "in model.layers.0.self_attn: q_proj W4A4, k_proj W4A16, v_proj W4A4",
        ),
        (
            "modelopt",
            {"scheme": "nvfp4-rne", "modules_to_not_convert": ["gate_proj", "lm_head"]},
            "in model.layers.0.mlp: gate_proj dense, up_proj W4A16.",
        ),
        (
            "compressed-tensors",
            {"scheme": "nvfp4-rne", "scheme_pattern": {"up_proj": "bf16"}},
            "in model.layers.0.mlp: gate_proj W4A16, up_proj dense.",
        ),
    ],
    ids=["inputs", "kept", "in high precision"],
)
def test_layers_that_engines_join_and_that_differ_are_said_to(layout, config, said, tmp_path):
    model = get_metis_model(llama(), MetisConfig(**config))
    if config["scheme"] == "w4a4":
        calibrate(model, [torch.arange(32).reshape(2, 16)])
    model.save_pretrained(tmp_path / "metis")
    report = export_checkpoint(tmp_path / "metis", tmp_path / "out", format=layout)
    (note,) = (note for note in report.notes if "different ways" in note)
    assert said in note


def test_layers_without_a_split_keep_their_own_scales_beside_a_side_file(tmp_path):
    """Engines, which join layers, do not read it; `load_low_rank` gives what enters the GEMMs."""
    pattern = {"q_proj": "nvfp4-rne", "k_proj": "nvfp4-rne"}
    source = checkpoint(tmp_path / "metis", scheme="metis-paper", scheme_pattern=pattern)
    out = tmp_path / "out"
    export_checkpoint(source, out, format="compressed-tensors", low_rank="side-file")
    loaded = load_low_rank(out)
    layers = dict(metis_layers(load_metis_model(source)))
    names = [name for name in layers if name.endswith(tuple(pattern))]
    assert len(names) == 4
    for name in names:
        assert torch.equal(loaded.get_submodule(name).weight, w_hat(layers[name])), name
