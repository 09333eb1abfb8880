"""W4A4 exports: read and computed by the compressed-tensors library, and ModelOpt's layout."""

from __future__ import annotations

import json
import math
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import VOCAB, llama
from safetensors.torch import load_file
from tensors import relative
from texts import documents

from deploy.checkpoints import checkpoint
from metis_hf import MetisConfig, calibrate, get_metis_model, metis_layers, set_precision
from metis_hf.deploy import export_checkpoint, load_metis_model, modelopt
from metis_hf.deploy.compressed_tensors import CompressedMatrix

# For inputs in bf16 the library divides in bf16, before it rounds scales and elements: some then
# become their neighbours. Kernels compute in fp32, as we do. Half of the quantization's own error,
# which is .095 of normal values.
BF16_LAYER_TOLERANCE = 0.05


def calibrated(path, build=llama, scheme="w4a4", tokenizer=False, **config):
    """A checkpoint with static scales of a few batches."""
    checkpoint(path, build, tokenizer=tokenizer, scheme=scheme, **config)
    model = load_metis_model(path)
    g = torch.Generator().manual_seed(2)
    calibrate(model, [torch.randint(0, VOCAB, (2, 32), generator=g) for _ in range(2)])
    model.save_pretrained(path)
    return path


def arguments(group):
    """What a config group says of weights and inputs, defaults filled in by the library."""
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(group)
    return config.config_groups


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with one calibrated checkpoint, "metis", and its exports by layout."""
    folder = tmp_path_factory.mktemp("w4a4")
    source = calibrated(folder / "metis")
    for layout in ("compressed-tensors", "modelopt"):
        export_checkpoint(source, folder / layout, format=layout)
    return folder


def state_of(folder, layout="compressed-tensors"):
    return load_file(folder / layout / "model.safetensors")


def of_layer(state, name):
    """A layer's tensors by the last part of their names."""
    return {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}


def test_the_config_is_the_preset_of_compressed_tensors(exported, tmp_path):
    from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16

    export_checkpoint(
        calibrated(tmp_path / "w4a16", scheme="w4a16"),
        tmp_path / "out",
        format="compressed-tensors",
    )
    for out, preset in ((exported / "compressed-tensors", NVFP4), (tmp_path / "out", NVFP4A16)):
        written = json.loads((out / "config.json").read_text())["quantization_config"]
        (group,) = arguments(written).values()
        assert group.targets == ["Linear"]
        for part in ("weights", "input_activations"):
            found, expected = getattr(group, part), preset.get(part)
            if expected is None:
                assert found is None
                continue
            same = {"observer", "zp_dtype"}  # of calibration, and of zero points, which NVFP4 lacks
            assert found.model_dump(exclude=same) == expected.model_dump(exclude=same)


def test_both_layouts_hold_the_same(exported):
    """Under the names, dtypes and shapes of compressed-tensors and of ModelOpt."""
    ours, theirs = state_of(exported), state_of(exported, "modelopt")
    for name, layer in metis_layers(load_metis_model(exported / "metis")):
        o, i = layer.out_features, layer.in_features
        mine, other = of_layer(ours, name), of_layer(theirs, name)
        codes, scales = (torch.uint8, (o, i // 2)), (torch.float8_e4m3fn, (o, i // 16))
        encode, decode = (torch.float32, (1,)), (torch.float32, ())
        assert {key: (value.dtype, tuple(value.shape)) for key, value in mine.items()} == {
            "weight_packed": codes, "weight_scale": scales,
            "weight_global_scale": encode, "input_global_scale": encode,
        }  # fmt: skip
        assert {key: (value.dtype, tuple(value.shape)) for key, value in other.items()} == {
            "weight": codes, "weight_scale": scales,
            "weight_scale_2": decode, "input_scale": decode,
        }  # fmt: skip
        assert torch.equal(mine["weight_packed"], other["weight"])
        assert torch.equal(*(s["weight_scale"].view(torch.uint8) for s in (mine, other)))
        for encoding, decoding in (("weight_global_scale", "weight_scale_2"),
                                   ("input_global_scale", "input_scale")):  # fmt: skip
            torch.testing.assert_close(mine[encoding] * other[decoding], torch.ones(1))
        # ModelOpt has amax / (6 * 448) for the input; its kernels multiply by it.
        torch.testing.assert_close(other["input_scale"], layer.input_amax / (6 * 448))


class TestCompressedTensors:
    """Computes with the exported checkpoint, by its own arithmetic."""

    @pytest.fixture(scope="class")
    def models(self, exported):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            exported / "compressed-tensors", dtype=torch.bfloat16
        ).eval()
        theirs(input_ids=torch.zeros(1, 2, dtype=torch.long))  # it unpacks at its first call
        return load_metis_model(exported / "metis"), theirs

    def test_inputs_in_fp32(self, models):
        """The same codes and scales, but for ties that two ways to round to fp32 decide."""
        from compressed_tensors.quantization.lifecycle.forward import forward_quantize

        ours, theirs = models
        for name, layer in metis_layers(ours):
            module = theirs.get_submodule(name)
            x = torch.randn(64, layer.in_features) * layer.input_amax / 3  # some are clipped
            scheme = module.quantization_scheme
            expected = forward_quantize(module, x, "input", scheme.input_activations)
            x_hat = layer.eval_scheme.fprop_input.quantizer(x, amax=layer.input_amax)
            different = (x_hat - expected).abs() > 1e-6 * expected.abs()
            assert different.float().mean() < 1e-3, name

    def test_layers_in_bf16(self, models):
        ours, theirs = models
        for name, layer in metis_layers(ours):
            x = (torch.randn(64, layer.in_features) * layer.input_amax / 4).bfloat16()
            with torch.no_grad():
                found = theirs.get_submodule(name)(x).float()
                assert relative(found, layer(x.float())) < BF16_LAYER_TOLERANCE, name


@pytest.mark.slow
def test_the_reported_loss_is_that_of_the_scheme(tmp_path):
    source = calibrated(tmp_path / "metis", tokenizer=True)
    text = tmp_path / "text.txt"
    text.write_text(documents()[5].text[:3000])
    report = export_checkpoint(
        source, tmp_path / "out", format="compressed-tensors", text=text, dtype="bfloat16"
    )
    model = load_metis_model(source)
    from metis_hf.deploy.source import held_out_windows

    windows = held_out_windows(source, text)
    with torch.no_grad():
        losses = [model(ids, labels=ids).loss.item() for ids in windows]
    counts = [ids.numel() - 1 for ids in windows]
    expected = sum(map(math.prod, zip(losses, counts))) / sum(counts)
    assert report.held_out["converted"] == pytest.approx(expected, abs=1e-5)
    # Embeddings and norms are in bf16 there, nothing else differs.
    assert report.held_out["fold"] == pytest.approx(report.held_out["converted"], abs=3e-3)
    weights_alone = export_checkpoint(
        calibrated(tmp_path / "w4a16", scheme="w4a16", tokenizer=True),
        tmp_path / "alone",
        format="compressed-tensors",
        text=text,
    )
    assert weights_alone.held_out["fold"] != report.held_out["fold"]


def test_some_layers_quantize_their_inputs_and_some_do_not(tmp_path, token_ids):
    source = calibrated(tmp_path / "metis", scheme_pattern={"down_proj": "w4a16"})
    export_checkpoint(source, tmp_path / "out", format="compressed-tensors")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    both, alone = arguments(config).values()
    assert both.input_activations is not None
    assert alone.input_activations is None
    assert {name.rpartition(".")[2] for name in alone.targets} == {"down_proj"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16
    )
    loaded(input_ids=token_ids)
    modules = dict(loaded.named_modules())
    assert modules["model.layers.0.mlp.up_proj"].quantization_scheme.input_activations is not None
    assert modules["model.layers.0.mlp.down_proj"].quantization_scheme.input_activations is None
    export_checkpoint(source, tmp_path / "modelopt", format="modelopt")
    described = json.loads((tmp_path / "modelopt/hf_quant_config.json").read_text())
    layers = described["quantization"]["quantized_layers"]
    assert described["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert {name.rpartition(".")[2] for name, layer in layers.items()
            if layer["quant_algo"] == "W4A16_NVFP4"} == {"down_proj"}  # fmt: skip


def test_modelopt_says_what_it_says(exported):
    described = json.loads((exported / "modelopt/hf_quant_config.json").read_text())
    assert described["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    config = json.loads((exported / "modelopt/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt"
    assert config["quant_algo"] == "NVFP4"
    assert config["ignore"] == ["lm_head"]


def test_a_model_trained_in_another_scheme_is_deployed(tmp_path, token_ids):
    """Its config takes the scheme, calibration the scales; the weights are those it has."""
    model = get_metis_model(llama(), MetisConfig(scheme="metis"))
    weights = {name: layer.weight.detach().clone() for name, layer in metis_layers(model)}
    set_precision(model, scheme="w4a4")
    calibrate(model, [token_ids])
    model.save_pretrained(tmp_path / "metis")
    export_checkpoint(tmp_path / "metis", tmp_path / "out", format="compressed-tensors")
    state = state_of(tmp_path, "out")
    for name, weight in weights.items():
        tensors = of_layer(state, name)
        assert "input_global_scale" in tensors
        scale = tensors["weight_global_scale"]
        assert weight.abs().max() <= 6 * 256 / scale.item() * (1 + 1e-6)
        packed = CompressedMatrix.from_state(tensors, "weight", weight.shape[1])
        assert relative(packed.dequantize(), weight) < 0.12


def test_eval_mode_is_the_exported_model(exported):
    """To the bit: the packed weights are those that the eval forward multiplies."""
    state = state_of(exported)
    for name, layer in metis_layers(load_metis_model(exported / "metis")):
        tensors = of_layer(state, name)
        packed = CompressedMatrix.from_state(tensors, "weight", layer.in_features)
        x = torch.randn(32, layer.in_features) * 6 * 448 / tensors["input_global_scale"] / 4
        x_hat = layer.eval_scheme.fprop_input.quantizer(x, amax=layer.input_amax)
        with torch.no_grad():
            assert torch.equal(layer(x), F.linear(x_hat, packed.dequantize(), layer.bias))


def test_modelopt_says_that_the_package_is_not_installed(monkeypatch):
    """But is on the path alone."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", missing)
    producer = modelopt.describe([], {"layer": True})["producer"]
    assert producer["version"] == "not installed"
