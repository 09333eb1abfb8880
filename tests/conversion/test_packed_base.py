"""NVFP4 checkpoints loaded packed and saved again; compressed-tensors is the other reader."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from conftest import VOCAB, llama
from safetensors.torch import load_file, save_file
from tensors import assert_same, same
from torch import nn
from transformers import AutoModelForCausalLM

from conversion.packed_tools import (
    FILE,
    LAYERS,
    base_bytes,
    dense_twin,
    ids,
    modelopt,
    rewrite,
)
from metis_hf import (
    MetisConfig,
    calibrate,
    get_metis_model,
    load_packed,
    metis_layers,
)
from metis_hf.deploy import export_checkpoint, load_metis_model
from metis_hf.deploy.compressed_tensors import CompressedMatrix
from metis_hf.deploy.packed import packed_config
from metis_hf.layers.packed import packed_layers, quantize_input


class TestLoading:
    def test_weights_and_logits_are_those_of_compressed_tensors(self, exported):
        model, dense = load_packed(exported), dense_twin(exported, torch.bfloat16)
        layers = packed_layers(model)
        assert len(layers) == LAYERS
        assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
        for name, layer in layers.items():
            assert torch.equal(layer.weight, dense.get_submodule(name).weight)
        assert torch.equal(model(ids()).logits, dense(ids()).logits)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.generation_config.max_new_tokens == 7
        assert model.dtype == torch.bfloat16
        assert not model.training
        exact = load_packed(exported, dtype=torch.float32)
        for name, layer in packed_layers(exact).items():
            assert layer.weight.dtype == torch.float32
            assert torch.equal(layer.weight.bfloat16(), layers[name].weight)
        assert exact(ids()).logits.dtype == torch.float32

    def test_layers_that_the_checkpoint_leaves_out_stay_dense(self, checkpoint):
        name = "model.layers.1.mlp.down_proj"

        def change(tensors):
            for last in ("packed", "scale", "global_scale"):
                del tensors[f"{name}.weight_{last}"]
            tensors[f"{name}.weight"] = torch.full((64, 96), 0.5, dtype=torch.bfloat16)

        rewrite(checkpoint, change, lambda config: config["ignore"].append(name))
        model = load_packed(checkpoint)
        assert len(packed_layers(model)) == LAYERS - 1
        assert type(model.get_submodule(name)) is nn.Linear
        assert bool((model.get_submodule(name).weight == 0.5).all())

    def test_shards(self, exported, tmp_path):
        model = load_packed(exported)
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        again = load_packed(tmp_path)
        assert same(base_bytes(again), base_bytes(model))
        assert torch.equal(again(ids()).logits, model(ids()).logits)

    def test_memory(self, exported):
        """4.5 bits an element, one fp32 scale a layer; no dense copy after a pass."""
        model = load_packed(exported)
        layers = packed_layers(model).values()
        elements = sum(layer.in_features * layer.out_features for layer in layers)
        held = sum(layer.nbytes for layer in layers)
        assert held == elements * 4.5 / 8 + 4 * LAYERS
        model(ids(), labels=ids()).loss.backward()
        assert sum(layer.nbytes for layer in layers) == held
        dense = sum(p.numel() for p in model.parameters())
        assert dense == VOCAB * 64 + 64 * 5  # embeddings, tied; norms

    def test_other_classes_load_with_the_config(self, exported):
        config = packed_config(exported, num_labels=3)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            exported, config=config
        )
        assert len(packed_layers(model)) == LAYERS
        assert model.score.weight.shape == (3, 64)
        with_body = transformers.AutoModel.from_pretrained(exported, config=config)
        assert same(
            {k.removeprefix("model."): v for k, v in base_bytes(model).items()},
            base_bytes(with_body),
        )

    def test_biases(self, tmp_path):
        torch.manual_seed(3)
        source = get_metis_model(
            llama(attention_bias=True, tie_word_embeddings=True), MetisConfig(scheme="nvfp4-rne")
        )
        for name, param in source.named_parameters():
            if name.endswith("bias"):
                param.data.normal_()
        source.save_pretrained(tmp_path / "metis")
        path = tmp_path / "nvfp4"
        export_checkpoint(tmp_path / "metis", path, format="compressed-tensors")
        expected = dense_twin(path, torch.bfloat16)(ids()).logits
        for where in (path, modelopt(path, tmp_path / "modelopt", "W4A16_NVFP4")):
            model = load_packed(where)
            assert torch.equal(model(ids()).logits, expected)
            assert not model.model.layers[0].self_attn.q_proj.bias.requires_grad


class TestActivations:
    def test_as_configured_or_not(self, w4a4, exported):
        model = load_packed(w4a4)
        assert all(layer.quantizes_input for layer in packed_layers(model).values())
        assert "activations=nvfp4" in repr(model)
        plain = load_packed(w4a4, activations="high precision")
        assert torch.equal(plain(ids()).logits, load_packed(exported)(ids()).logits)
        assert not torch.equal(model(ids()).logits, plain(ids()).logits)
        # The scale stays in the checkpoint whatever the pass computes with.
        assert same(base_bytes(model), base_bytes(plain))

    def test_unknown_choice(self, w4a4):
        with pytest.raises(
            ValueError, match="activations='fp8' is unknown; choose 'as configured'"
        ):
            load_packed(w4a4, activations="fp8")

    def test_saved_as_configured(self, w4a4, tmp_path):
        load_packed(w4a4, activations="high precision").save_pretrained(tmp_path / "again")
        again = load_packed(tmp_path / "again")
        assert all(layer.quantizes_input for layer in packed_layers(again).values())
        dense_twin(tmp_path / "again", torch.bfloat16)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A calibrated model, exported W4A4 in both layouts; down_proj's inputs are not quantized."""
    folder = tmp_path_factory.mktemp("deployed")
    torch.manual_seed(7)
    config = MetisConfig(scheme="w4a4", scheme_pattern={"down_proj": "w4a16"})
    model = get_metis_model(llama(), config)
    calibrate(model, [ids(4)])
    model.save_pretrained(folder / "metis")
    for layout in ("compressed-tensors", "modelopt"):
        export_checkpoint(folder / "metis", folder / layout, format=layout)
    return folder


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_scale_of_inputs_that_one_layer_lacks_is_missed(deployed, layout, tmp_path):
    """Also where other layers' inputs are not quantized, and need none."""
    folder = shutil.copytree(deployed / layout, tmp_path / "cut")
    state = load_file(folder / "model.safetensors")
    lost = next(key for key in state if "q_proj.input" in key)
    del state[lost]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"the checkpoint lacks {lost}"):
        load_packed(folder)


class TestOwnExports:
    """A layer loaded packed computes what the trained layer computes in evaluation."""

    @pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
    def test_operands_are_those_of_the_scheme(self, deployed, layout):
        packed = load_packed(deployed / layout, dtype=torch.float32)
        for name, layer in metis_layers(load_metis_model(deployed / "metis")):
            mine = packed.get_submodule(name)
            assert mine.quantizes_input == (not name.endswith("down_proj"))
            # The tensor scale divides block scales here and multiplies values there.
            tolerance = {"rtol": 2**-21, "atol": 0}
            w_hat = CompressedMatrix(
                mine.weight_packed, mine.weight_scale, mine.weight_global_scale, mine.in_features
            ).dequantize()
            torch.testing.assert_close(mine.weight, w_hat, **tolerance)
            x = torch.randn(16, layer.in_features)
            with torch.no_grad():
                torch.testing.assert_close(mine(x), layer(x), rtol=1e-4, atol=1e-5)
            if mine.quantizes_input and layout == "compressed-tensors":
                x_hat = layer.eval_scheme.fprop_input.quantizer(x, amax=layer.input_amax)
                found = quantize_input(x, mine.input_global_scale, torch.float32)
                assert torch.equal(found, x_hat)

    @pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
    def test_some_layers_without_scales_for_inputs_save_as_such(self, deployed, layout, tmp_path):
        model = load_packed(deployed / layout)
        model.save_pretrained(tmp_path)
        again = load_packed(tmp_path)
        assert same(base_bytes(model), base_bytes(again))
        assert torch.equal(model(ids()).logits, again(ids()).logits)
        groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        both, alone = groups["config_groups"].values()
        assert both["input_activations"]["dynamic"] == "local"
        assert {name.rpartition(".")[2] for name in alone["targets"]} == {"down_proj"}
        dense_twin(tmp_path, torch.bfloat16)


class TestModelOpt:
    @pytest.mark.parametrize(
        ("own_file", "algorithm"), [(False, "NVFP4"), (True, "NVFP4"), (True, "W4A16_NVFP4")]
    )
    def test_is_the_same_model(self, w4a4, tmp_path, own_file, algorithm):
        path = modelopt(w4a4, tmp_path / "modelopt", algorithm, own_file)
        model = load_packed(path)
        quantizes = algorithm == "NVFP4"
        assert all(x.quantizes_input == quantizes for x in packed_layers(model).values())
        twin = load_packed(w4a4, activations="as configured" if quantizes else "high precision")
        for name, layer in packed_layers(twin).items():
            mine = model.get_submodule(name)
            assert torch.equal(mine.weight_packed, layer.weight_packed)
            assert torch.equal(mine.weight, layer.weight) or torch.allclose(
                mine.weight.float(), layer.weight.float(), rtol=2**-7, atol=0
            )
            # The reciprocal of a reciprocal, rounded twice.
            torch.testing.assert_close(
                mine.weight_global_scale, layer.weight_global_scale, rtol=2**-22, atol=0
            )
        assert type(model.lm_head) is nn.Linear

    def test_scales_are_those_of_compressed_tensors_own_converter(self, w4a4, tmp_path):
        from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import (
            ModelOptNvfp4Converter,
        )

        path = modelopt(w4a4, tmp_path / "modelopt")
        converter = ModelOptNvfp4Converter(ignore=["lm_head"], targets=[r"re:.*proj$"])
        theirs = converter.process(load_file(path / FILE))
        ours = load_packed(path).state_dict()
        for key in ours:
            if "global_scale" in key or "packed" in key:
                assert torch.equal(ours[key].reshape(-1), theirs[key].reshape(-1)), key

    def test_saves_as_compressed_tensors(self, w4a4, tmp_path):
        # from_pretrained is enough
        model = AutoModelForCausalLM.from_pretrained(modelopt(w4a4, tmp_path / "modelopt"))
        model.save_pretrained(tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "compressed-tensors"
        assert config["ignore"] == ["lm_head"]
        assert same(base_bytes(load_packed(tmp_path / "out")), base_bytes(model))
        twin = dense_twin(tmp_path / "out", torch.bfloat16)
        for name, layer in packed_layers(model).items():
            assert torch.equal(twin.get_submodule(name).weight, layer.weight)


def test_saving_writes_what_was_read(checkpoint, tmp_path):
    model = load_packed(checkpoint)
    model.save_pretrained(tmp_path / "again")
    assert_same(load_file(tmp_path / "again" / FILE), load_file(checkpoint / FILE))
    configs = [
        json.loads((path / "config.json").read_text())["quantization_config"]
        for path in (checkpoint, tmp_path / "again")
    ]
    assert configs[0] == configs[1]
    # Plain transformers, which unpacks at the first forward pass.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert torch.equal(plain(ids()).logits, model(ids()).logits)
