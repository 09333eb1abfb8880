"""Fused experts in packed checkpoints: their names in files, their values, and the way back."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from conversion.architectures import ARCHITECTURES
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tensors import assert_same, relative
from texts import documents
from typer.testing import CliRunner

from deploy.checkpoints import checkpoint, logits, mixtral, w_hat
from metis_hf import MetisConfig, calibrate, get_metis_model, load_packed, metis_layers, to_dense
from metis_hf.cli.main import app
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.compressed_tensors import CompressedMatrix
from metis_hf.deploy.packed import packed_config
from metis_hf.deploy.source import held_out_windows
from metis_hf.lab.model_source import open_checkpoint
from metis_hf.layers.packed import PackedLinear, packed_layers

GLU = ("gate_proj", "up_proj", "down_proj")
# Architecture -> its experts in files as vLLM's loader names them, and their three matrices.
FAMILIES = {
    "mixtral": ("model.layers.{}.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen2-moe": ("model.layers.{}.mlp.experts", GLU),
    "qwen3-moe": ("model.layers.{}.mlp.experts", GLU),
    "gpt-oss": ("model.layers.{}.mlp.experts", GLU),  # gate and up interleaved, with biases
}
LAYERS, EXPERTS = 2, 4
EXPERT = re.compile(r"(.*experts)\.metis_(\w+)\.(\d+)$")
ids = torch.randint(0, 64, (2, 48), generator=torch.Generator().manual_seed(1))


def trained(name, scheme="w4a4"):
    """A calibrated model whose other weights are what BF16 files hold."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build().bfloat16().float()
    model = get_metis_model(model, MetisConfig(scheme=scheme)).eval()
    calibrate(model, [ids])
    return model


def exported(model, path, format="compressed-tensors"):
    model.save_pretrained(path / "run")
    return export_checkpoint(path / "run", path / "out", format=format), path / "out"


def state_of(out):
    return load_file(out / "model.safetensors")


def state_of_layer(state, name):
    return {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    model = trained(request.param)
    report, out = exported(model, tmp_path_factory.mktemp("experts"))
    return request.param, model, report, out


def test_files_have_the_names_that_engines_read(family):
    name, _, report, out = family
    place, matrices = FAMILIES[name]
    state = state_of(out)
    parts = {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"}
    parts |= {"bias"} if name == "gpt-oss" else set()
    expected = {
        f"{place.format(layer)}.{index}.{matrix}.{part}"
        for layer in range(LAYERS)
        for index in range(EXPERTS)
        for matrix in matrices
        for part in parts
    }
    assert expected == {key for key in state if ".experts." in key}
    gates = [
        key.removesuffix("weight") for key in state if re.search(r"(gate|router)\.weight", key)
    ]
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {gate[:-1] for gate in gates} <= {*ignored}
    assert not any("experts" in each for each in ignored if "shared" not in each)
    assert len([each for each in report.packed if ".experts." in each]) == LAYERS * EXPERTS * 3
    assert "load_packed" in report.loading


def test_weights_are_the_trained_ones_to_the_bit(family):
    name, model, _, out = family
    place, matrices = FAMILIES[name]
    state, seen = state_of(out), 0
    for layer_name, layer in metis_layers(model):
        if not (found := EXPERT.match(layer_name)):
            continue
        experts, key, index = found.groups()
        block = place.format(re.search(r"layers\.(\d+)", experts).group(1))
        own = matrices[:2] if key == "gate_up_proj" else matrices[2:]
        values = [
            CompressedMatrix.from_state(
                state_of_layer(state, f"{block}.{index}.{each}"), "weight", layer.in_features
            ).dequantize()
            for each in own
        ]
        interleaved = name == "gpt-oss" and len(own) == 2
        whole = torch.stack(values, 1).flatten(0, 1) if interleaved else torch.cat(values)
        assert torch.equal(whole, w_hat(layer)), layer_name
        seen += 1
    assert seen == LAYERS * EXPERTS * 2


def test_what_is_loaded_computes_as_the_trained_model(family):
    _, model, _, out = family
    expected, loaded = logits(model, ids), load_packed(out, dtype=torch.float32)
    only = load_packed(out, dtype=torch.float32, activations="high precision")
    # A sum in another order moves a few inputs over the edge between two codes.
    assert relative(logits(loaded, ids), expected) < 0.05
    x = torch.randn(32, 64)
    choices = torch.rand(32, EXPERTS).argsort(-1)[:, :2]
    for ours, theirs, plain in zip(*(model.model.layers for model in (model, loaded, only))):
        found, expected, unquantized = (
            block.mlp.experts(x, choices, torch.ones(32, 2)).detach()
            for block in (theirs, ours, plain)
        )
        assert relative(found, expected) < 1e-3
        assert relative(unquantized, expected) > 0.03
    evaluated = open_checkpoint(out).load("scheme", "float32", torch.device("cpu"))
    assert torch.equal(logits(evaluated, ids), logits(loaded, ids))
    dense = to_dense(loaded)
    assert not packed_layers(dense)
    torch.testing.assert_close(logits(dense, ids), logits(only, ids), rtol=1e-3, atol=1e-3)


def test_saving_again_writes_the_same(family, tmp_path):
    *_, out = family
    load_packed(out).save_pretrained(tmp_path)
    assert_same(state_of(out), state_of(tmp_path))
    configs = [json.loads((each / "config.json").read_text()) for each in (out, tmp_path)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_other_layout_and_weights_alone(name, tmp_path):
    model = trained(name, "w4a16")
    expected, found = logits(model, ids), []
    for format in ("compressed-tensors", "modelopt"):
        report, out = exported(model, tmp_path / format, format)
        assert not any(key.endswith(("input_scale", "input_global_scale")) for key in state_of(out))
        found.append(logits(load_packed(out, dtype=torch.float32), ids))
        assert relative(found[-1], expected) < 1e-3
    assert relative(*found) < 1e-3
    place, matrices = FAMILIES[name]
    assert f"{place.format(0)}.0.{matrices[0]}.weight_scale_2" in state_of(out)
    load_packed(out).save_pretrained(tmp_path / "again")
    assert (
        state_of(tmp_path / "again").keys()
        == state_of(tmp_path / "compressed-tensors" / "out").keys()
    )
    assert any("fused experts, which are packed" in note for note in report.notes)


def test_experts_that_see_no_token_take_the_scale_of_the_others():
    model = get_metis_model(mixtral(), MetisConfig(scheme="w4a4"))
    calls = dict.fromkeys(dict(metis_layers(model)), 0)
    for name, layer in metis_layers(model):
        layer.register_forward_pre_hook(
            lambda *_, name=name: calls.__setitem__(name, calls[name] + 1)
        )
    found = calibrate(model, [ids[:1, :2]], method="amax")
    of_experts = {name: one for name, one in found.items() if EXPERT.match(name)}
    unseen = [name for name in of_experts if not calls[name]]
    assert unseen
    assert [name for name, one in of_experts.items() if not one.largest] == unseen
    for name in of_experts:
        others = name.rpartition(".")[0]
        together = [one for each, one in of_experts.items() if each.rpartition(".")[0] == others]
        assert {one.input_amax for one in together} == {max(one.largest for one in together)}
    weights = {one.weight_amax for one in of_experts.values()}
    assert len(weights) == len(of_experts)  # each has its own


def test_the_command_says_how_many_saw_no_token(tmp_path):
    source = checkpoint(tmp_path / "metis", mixtral, tokenizer=True, scheme="w4a4")
    (tmp_path / "text.txt").write_text(documents()[0].text[:400])
    run = ["export", source, "--out", tmp_path / "out", "--format", "compressed-tensors"]
    run += ["--calibrate", tmp_path / "text.txt", "--calibration-length", 2]
    run += ["--calibration-sequences", 1, "--text", tmp_path / "text.txt"]
    done = CliRunner().invoke(app, list(map(str, run)))
    assert done.exit_code == 0, done.output
    count = int(re.search(r"(\d+) expert layers saw no token", done.output).group(1))
    loaded = load_packed(tmp_path / "out", dtype=torch.float32)
    assert 0 < count < 2 * LAYERS * EXPERTS
    assert len(packed_layers(loaded)) == LAYERS * (4 + 3 * EXPERTS)
    found = torch.cat(
        [
            F.cross_entropy(logits(loaded, ids)[0, :-1], ids[0, 1:], reduction="none")
            for ids in held_out_windows(source, tmp_path / "text.txt")
        ]
    ).mean()
    record = json.loads((tmp_path / "out" / "metis_export.json").read_text())
    assert abs(found.item() - record["held_out"]["fold"]) < 1e-3


class TestRefused:
    def test_some_weights_of_experts_left_out(self, tmp_path):
        config = MetisConfig(scheme="w4a16", exclude_modules=".*experts.down_proj")
        model = get_metis_model(mixtral(), config)
        calibrate(model, [])
        model.save_pretrained(tmp_path / "run")
        match = r"experts\.down_proj: not quantized, while other weights.*modules_to_not_convert"
        with pytest.raises(ValueError, match=match):
            export_checkpoint(tmp_path / "run", tmp_path / "out", format="compressed-tensors")
        assert not (tmp_path / "out").exists()

    def test_a_side_file(self, tmp_path):
        source = checkpoint(tmp_path / "run", mixtral, scheme="metis", split_weight=True)
        with pytest.raises(ValueError, match='experts; use low_rank="fold"'):
            export_checkpoint(
                source, tmp_path / "out", format="compressed-tensors", low_rank="side-file"
            )
        export_checkpoint(source, tmp_path / "out", format="compressed-tensors")
        load_packed(tmp_path / "out")

    def test_a_checkpoint_that_lacks_an_expert(self, tmp_path):
        _, out = exported(trained("qwen3-moe", "w4a16"), tmp_path)
        state = state_of(out)
        lost = [key for key in state if "layers.1.mlp.experts.2.up_proj" in key]
        kept = {key: tensor for key, tensor in state.items() if key not in lost}
        assert len(lost) == 3
        save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"lacks up_proj of expert 2; restore the files"):
            load_packed(out)


def test_adapters_over_packed_experts(tmp_path):
    _, out = exported(trained("qwen3-moe"), tmp_path)
    model = get_peft_model(load_packed(out), LoraConfig(r=2, target_modules="all-linear"))
    model(input_ids=ids, labels=ids).loss.backward()
    adapters = [name for name, param in model.named_parameters() if param.requires_grad]
    assert any("experts" in name for name in adapters)
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)
    assert isinstance(next(iter(packed_layers(model).values())), PackedLinear)


def test_the_base_alone(tmp_path):
    """Its layers have other names than the files."""
    _, out = exported(trained("qwen3-moe", "w4a16"), tmp_path)
    whole = load_packed(out, dtype=torch.float32)
    config = packed_config(out)
    base = transformers.Qwen3MoeModel.from_pretrained(out, config=config, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, whole.model(ids).last_hidden_state)
