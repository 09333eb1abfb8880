"""NVFP4 checkpoints loaded packed, with LoRA on top; compressed-tensors is the other reader."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import transformers
from conftest import VOCAB, llama
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from metis_hf import (
    MetisConfig,
    calibrate,
    get_metis_model,
    load_packed,
    merge_packed,
    metis_layers,
    to_dense,
)
from metis_hf.conversion.packed import packed_config, packed_layers
from metis_hf.export import export_checkpoint, load_metis_model
from metis_hf.export.compressed_tensors import CompressedMatrix
from metis_hf.layers.packed import PackedLinear, PackedWeight, quantize_input

LAYERS = 14  # of the two blocks
INPUT_SCALE = 700.0
FILE = "model.safetensors"


def rewrite(path, change, quantization=None):
    """Apply `change` to a checkpoint's tensors, and to its quantization config another."""
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE, {"format": "pt"})
    if quantization is not None:
        config = json.loads((path / "config.json").read_text())
        quantization(config["quantization_config"])
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A tiny Llama with one bias-free block set, written by our own export."""
    folder = tmp_path_factory.mktemp("packed")
    torch.manual_seed(5)
    model = get_metis_model(llama(tie_word_embeddings=True), MetisConfig(scheme="nvfp4-rne"))
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder / "metis")
    export_checkpoint(folder / "metis", folder / "nvfp4", format="compressed-tensors")
    return folder / "nvfp4"


@pytest.fixture
def checkpoint(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "nvfp4")


@pytest.fixture
def w4a4(checkpoint):
    def change(tensors):
        for key in [key for key in tensors if key.endswith("weight_packed")]:
            tensors[key.replace("weight_packed", "input_global_scale")] = torch.tensor(
                [INPUT_SCALE]
            )

    def quantization(config):
        group = config["config_groups"]["group_0"]
        group["input_activations"] = {
            **group["weights"], "dynamic": "local", "observer": "static_minmax",
        }  # fmt: skip

    return rewrite(checkpoint, change, quantization)


def modelopt(source, target, algorithm="NVFP4", own_file=False):
    """Write a compressed-tensors checkpoint in ModelOpt's layout, as its exporter describes it."""
    shutil.copytree(source, target)
    tensors, out = load_file(source / FILE), {}
    for key, value in tensors.items():
        owner, _, last = key.rpartition(".")
        if last == "weight_packed":
            out[f"{owner}.weight"] = value
        elif last == "weight_global_scale":
            out[f"{owner}.weight_scale_2"] = (1 / value).reshape(())
        elif last == "input_global_scale":
            out[f"{owner}.input_scale"] = (1 / value).reshape(())
        else:
            out[key] = value
    save_file(out, target / FILE, {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    if own_file:
        described = {
            "producer": {"name": "modelopt", "version": "0.40.0"},
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ["lm_head"],
            },
        }
        (target / "hf_quant_config.json").write_text(json.dumps(described))
    else:
        args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        config["quantization_config"] = {
            "config_groups": {
                "group_0": {"input_activations": args, "weights": args, "targets": ["Linear"]}
            },
            "ignore": ["lm_head"],
            "quant_algo": algorithm,
            "producer": {"name": "modelopt", "version": "0.40.0"},
            "quant_method": "modelopt",
        }
    (target / "config.json").write_text(json.dumps(config))
    return target


def dense_twin(path, dtype):
    """Plain transformers with the weights that compressed-tensors makes of the checkpoint."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=CompressedTensorsConfig(dequantize=True)
    )


def lora(model, **options):
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", **options})
    return get_peft_model(model, config)


def with_adapter(model, size=0.05):
    """Adapters that change something: B starts at zero."""
    model = lora(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(size * torch.randn(param.shape, generator=generator))
    return model


def ids(rows=2):
    return torch.randint(0, VOCAB, (rows, 12), generator=torch.Generator().manual_seed(1))


def base_bytes(model):
    return {
        f"{name}.{key}": value.clone().view(torch.uint8)
        for name, layer in packed_layers(model).items()
        for key, value in layer.state_dict().items()
    }


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


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

    def test_fp32(self, exported):
        model = load_packed(exported, dtype=torch.float32)
        layer = model.model.layers[0].mlp.up_proj
        assert layer.weight.dtype == torch.float32
        dense = dense_twin(exported, torch.bfloat16).model.layers[0].mlp.up_proj
        assert torch.equal(layer.weight.bfloat16(), dense.weight)
        assert model(ids()).logits.dtype == torch.float32

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

    def test_memory_of_smollm2(self):
        """Its 210 packed layers take 9/32 of their bytes in BF16, and 4 bytes each."""
        config = transformers.LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        )  # fmt: skip
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
            linears = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
            held = sum(PackedLinear(m.in_features, m.out_features).nbytes for m in linears)
        bf16 = 2 * sum(m.weight.numel() for m in linears)
        assert bf16 == 212_336_640
        assert held == bf16 * 9 // 32 + 4 * 210 == 59_720_520
        rest = 2 * (sum(p.numel() for p in model.parameters()) - bf16 // 2)
        assert (held + rest) / (bf16 + rest) == pytest.approx(0.433, abs=1e-3)

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
    @pytest.mark.parametrize("own_file", [False, True])
    @pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
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

    def test_from_pretrained_is_enough(self, w4a4, tmp_path):
        path = modelopt(w4a4, tmp_path / "modelopt")
        model = AutoModelForCausalLM.from_pretrained(path)
        assert len(packed_layers(model)) == LAYERS

    def test_saves_as_compressed_tensors(self, w4a4, tmp_path):
        model = load_packed(modelopt(w4a4, tmp_path / "modelopt"))
        model.save_pretrained(tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "compressed-tensors"
        assert config["ignore"] == ["lm_head"]
        assert same(base_bytes(load_packed(tmp_path / "out")), base_bytes(model))
        twin = dense_twin(tmp_path / "out", torch.bfloat16)
        for name, layer in packed_layers(model).items():
            assert torch.equal(twin.get_submodule(name).weight, layer.weight)


class TestSaving:
    def test_writes_what_it_read(self, checkpoint, tmp_path):
        model = load_packed(checkpoint)
        model.save_pretrained(tmp_path / "again")
        old, new = load_file(checkpoint / FILE), load_file(tmp_path / "again" / FILE)
        assert old.keys() == new.keys()
        for key in old:
            assert old[key].dtype == new[key].dtype
            assert torch.equal(old[key].view(torch.uint8), new[key].view(torch.uint8)), key
        configs = [
            json.loads((path / "config.json").read_text())["quantization_config"]
            for path in (checkpoint, tmp_path / "again")
        ]
        assert configs[0] == configs[1]
        # Plain transformers, which unpacks at the first forward pass.
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
        assert torch.equal(plain(ids()).logits, model(ids()).logits)


class TestLora:
    def test_only_adapters_train_and_gradients_are_those_over_a_dense_base(self, exported):
        model = with_adapter(load_packed(exported, dtype=torch.float32))
        twin = load_packed(exported, dtype=torch.float32)
        twin = with_adapter(to_dense(twin))
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            n for n, p in twin.named_parameters() if p.requires_grad
        }
        wrapped = [m for m in model.modules() if type(m).__name__ == "PackedLoraLinear"]
        assert len(wrapped) == LAYERS
        losses = [m(ids(), labels=ids()).loss for m in (model, twin)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        grads = dict(twin.named_parameters())
        for name, param in model.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(param.grad, grads[name].grad)

    @pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r".*mlp\.(up|down)_proj"])
    def test_targets_by_name(self, exported, targets):
        model = lora(load_packed(exported), target_modules=targets)
        assert sum(type(m).__name__ == "PackedLoraLinear" for m in model.modules()) == 4

    def test_adapter_reloads(self, exported, tmp_path):
        model = with_adapter(load_packed(exported))
        expected = model(ids()).logits
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert "metis_config" not in config
        assert config["base_model_name_or_path"] == str(exported)
        again = PeftModel.from_pretrained(load_packed(exported), tmp_path)
        assert torch.equal(again(ids()).logits, expected)
        # The same adapter over plain transformers with compressed-tensors.
        plain = PeftModel.from_pretrained(dense_twin(exported, torch.bfloat16), tmp_path)
        assert torch.equal(plain(ids()).logits, expected)

    def test_two_adapters(self, exported):
        model = with_adapter(load_packed(exported))
        model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
        model.set_adapter("second")
        assert torch.equal(model(ids()).logits, load_packed(exported)(ids()).logits)

    def test_refusals(self, exported):
        with pytest.raises(ValueError, match="is not supported"):
            lora(load_packed(exported), target_modules=["input_layernorm"])
        with pytest.raises(ValueError, match="over a packed layer"):
            lora(load_packed(exported), use_dora=True)
        with pytest.raises(ValueError, match="which a packed layer stores quantized"):
            lora(load_packed(exported), init_lora_weights="pissa")
        with pytest.raises(ValueError, match=r"asks .*q_proj to train in full"):
            lora(load_packed(exported), target_modules=["v_proj"], modules_to_save=["q_proj"])


def trainer(model, folder, **options):
    data = [{"input_ids": row, "labels": row} for row in ids(8)]
    arguments = transformers.TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=4, learning_rate=0.02, report_to=[],
        save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data)


class TestTrainer:
    @pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "bf16": True}])
    def test_adapter_trains_and_the_base_stays(self, w4a4, tmp_path, options):
        dtype = torch.float32 if options else torch.bfloat16
        model = lora(load_packed(w4a4, dtype=dtype))
        before = base_bytes(model)
        run = trainer(model, tmp_path / "run", **options)
        run.train()
        losses = [row["loss"] for row in run.state.log_history if "loss" in row]
        assert losses[-1] < 0.97 * losses[0]
        assert same(base_bytes(model), before)
        run.save_model(tmp_path / "adapter")
        again = PeftModel.from_pretrained(load_packed(w4a4, dtype=dtype), tmp_path / "adapter")
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in options):
            found = again.eval()(ids()).logits
        assert torch.equal(found.float(), model.eval()(ids()).logits.float())

    def test_the_base_alone_does_not_train(self, exported, tmp_path):
        with pytest.raises(ValueError, match="Please attach trainable adapters"):
            trainer(load_packed(exported), tmp_path)

    def test_nor_in_a_scheme(self, exported):
        with pytest.raises(
            ValueError, match=r"packed in NVFP4 and frozen.*to_dense\(model\) first"
        ):
            get_metis_model(load_packed(exported))


class TestMerging:
    def test_is_refused_with_its_cost(self, exported):
        model = with_adapter(load_packed(exported))
        before, logits = base_bytes(model), model(ids()).logits
        with pytest.raises(
            ValueError, match=r"an error of \d+\.\d\d% of the merged weight"
        ) as info:
            model.merge_and_unload()
        assert all(
            word in str(info.value) for word in ("merge_packed", "to_dense", "save_pretrained")
        )
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        w = layer.base_layer.packed.dense(torch.float32)
        merged = w + layer.get_delta_weight("default").float()
        again = PackedWeight.of(merged).dense(torch.float32)
        assert f"{(again - merged).norm() / merged.norm():.2%} of the merged" in str(info.value)
        with pytest.raises(ValueError, match=r"14 layers to NVFP4 again.*requantize=True"):
            merge_packed(model)
        assert same(base_bytes(model), before)
        assert torch.equal(model(ids()).logits, logits)

    def test_requantizes_if_asked(self, exported, tmp_path):
        model = with_adapter(load_packed(exported))
        wanted = {
            name.removeprefix("base_model.model."): (
                m.base_layer.packed.dense(torch.float32) + m.get_delta_weight("default").float()
            )
            for name, m in model.named_modules()
            if type(m).__name__ == "PackedLoraLinear"
        }
        merged, report = merge_packed(model, requantize=True)
        assert type(merged).__name__ == "LlamaForCausalLM"
        layers = packed_layers(merged)
        assert {row.name for row in report.layers} == set(layers) == set(wanted)
        for row in report.layers:
            found, weight = layers[row.name].packed.dense(torch.float32), wanted[row.name]
            assert row.error == pytest.approx(
                float((found - weight.detach()).norm() / weight.detach().norm())
            )
            assert 0.05 < row.error < 0.15  # NVFP4 of normal values: 9.5 %
        assert "error of requantizing" in str(report)
        merged.save_pretrained(tmp_path)
        assert torch.equal(dense_twin(tmp_path, torch.bfloat16)(ids()).logits, merged(ids()).logits)

    def test_fused_layers_share_their_scale(self, exported):
        def scales(block):
            attention = block.self_attn
            layers = (attention.q_proj, attention.k_proj, attention.v_proj)
            return {float(layer.weight_global_scale) for layer in layers}

        model = load_packed(exported)
        for block in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(block.self_attn, name).weight_global_scale.fill_(9000.0)
        merged, _ = merge_packed(with_adapter(model), requantize=True)
        assert all(len(scales(block)) == 1 for block in merged.model.layers)
        assert 9000.0 not in scales(merged.model.layers[0])
        # k has no adapter and stays as it is, so the others keep the scale that it has.
        partial = load_packed(exported)
        for block in partial.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(block.self_attn, name).weight_global_scale.fill_(9000.0)
        partial = lora(partial, target_modules=["q_proj", "v_proj"])
        merged, _ = merge_packed(partial, requantize=True)
        assert all(scales(block) == {9000.0} for block in merged.model.layers)

    def test_dense_merge_is_exact(self, exported):
        model = with_adapter(load_packed(exported, dtype=torch.float32))
        expected = model(ids()).logits
        to_dense(model)
        assert torch.equal(model(ids()).logits, expected)
        plain = model.merge_and_unload()
        torch.testing.assert_close(plain(ids()).logits, expected, rtol=1e-4, atol=1e-5)
        assert not hasattr(plain.config, "quantization_config")
        assert not plain.is_quantized

    def test_nothing_to_merge(self, exported):
        with pytest.raises(ValueError, match="has no adapter over a packed layer"):
            merge_packed(load_packed(exported), requantize=True)

    def test_bad_adapter(self, exported):
        model = with_adapter(load_packed(exported))
        before = base_bytes(model)
        with torch.no_grad():
            model.base_model.model.model.layers[1].mlp.up_proj.lora_B["default"].weight[0, 0] = (
                math.nan
            )
        with pytest.raises(ValueError, match="has NaN or inf; nothing was merged"):
            merge_packed(model, requantize=True)
        assert same(base_bytes(model), before)


UP = "model.layers.0.mlp.up_proj"  # 96 x 64


def setting(key, value):
    def change(tensors):
        tensors[f"{UP}.{key}"] = value(tensors[f"{UP}.{key}"])

    return change


def fp8(byte, index=slice(0, 1)):
    def value(scale):
        scale = scale.clone()
        scale.view(torch.uint8)[index] = byte
        return scale

    return value


NVFP4_ARGS = {"num_bits": 4, "type": "float", "group_size": 16}


def changed(**changes):
    return lambda config: config.update(changes)


def group(**changes):
    return lambda config: config["config_groups"]["group_0"].update(changes)


BAD_TENSORS = {
    "zero": (setting("weight_global_scale", torch.zeros_like), "weight_global_scale is 0.0"),
    "nan": (setting("weight_global_scale", lambda t: t * math.nan), "weight_global_scale is nan"),
    "negative": (setting("weight_global_scale", lambda t: -t), "weight_global_scale is -"),
    "block-nan": (setting("weight_scale", fp8(0x7F)), "4 of 384 block scales are NaN or negative"),
    "block-negative": (setting("weight_scale", fp8(0xB0)), "4 of 384 block scales are NaN or neg"),
    "block-zero": (setting("weight_scale", fp8(0, slice(None))), "all block scales are zero"),
    "swizzled": (
        setting("weight_scale", lambda t: torch.zeros(128, 4).to(t.dtype)),
        r"weight_scale has shape \[128, 4\] for a weight of 96 x 64: .* padded or swizzled",
    ),
    "flat": (setting("weight_scale", lambda t: t.flatten()), "padded or swizzled for a kernel"),
    "shape": (
        setting("weight_packed", lambda t: t[:, :16].contiguous()),
        r"weight_packed is U8 \[96, 16\]; NVFP4 for a weight of 96 x 64 has U8 \[96, 32\]",
    ),
    "dtype": (setting("weight_scale", lambda t: t.float()), r"weight_scale is F32 \[96, 4\]"),
    "missing": (
        lambda tensors: tensors.pop(f"{UP}.weight_global_scale"),
        rf"the checkpoint lacks {UP}.weight_global_scale. Nothing can stand in",
    ),
    "zero-point": (
        lambda tensors: tensors.update({f"{UP}.weight_zero_point": torch.zeros(96, 4)}),
        "has weight_zero_point beside its packed weight",
    ),
    "missing-codes": (lambda tensors: tensors.pop(f"{UP}.weight_packed"), "lacks .*weight_packed"),
}
BAD_CONFIGS = {
    "mxfp4": (group(format="mxfp4-pack-quantized"), "in the format 'mxfp4-pack-quantized'"),
    "fp8": (group(format="float-quantized"), "in the format 'float-quantized'; load_packed reads"),
    "int4": (
        group(weights={"num_bits": 4, "type": "int", "group_size": 16}),
        "weights of group_0 are type=int, num_bits=4",
    ),
    "inputs": (
        group(input_activations={"num_bits": 8, "type": "float", "dynamic": True}),
        "input activations of group_0 are type=float, num_bits=8",
    ),
    "no-scale": (
        group(input_activations={**NVFP4_ARGS, "dynamic": False}),
        "lacks .*input_global_scale",
    ),
    "not-packed": (changed(quantization_status="frozen"), "its weights are not packed"),
    "marked": (changed(scale_layout="swizzled"), "block scales are swizzled for a kernel"),
    "method": (changed(quant_method="mxfp4"), "is quantized by 'mxfp4'; load_packed reads"),
    "no-groups": (changed(config_groups={}), "has no config group"),
}


class TestBadInput:
    @pytest.mark.parametrize("case", BAD_TENSORS)
    def test_tensors(self, checkpoint, case):
        change, message = BAD_TENSORS[case]
        with pytest.raises(ValueError, match=message) as info:
            load_packed(rewrite(checkpoint, change))
        assert UP in str(info.value)

    @pytest.mark.parametrize("case", BAD_CONFIGS)
    def test_configs(self, checkpoint, case):
        change, message = BAD_CONFIGS[case]
        with pytest.raises(ValueError, match=message):
            load_packed(rewrite(checkpoint, lambda tensors: None, change))

    @pytest.mark.parametrize("algorithm", ["FP8", "NVFP4_AWQ", "MIXED_PRECISION"])
    def test_other_algorithms_of_modelopt(self, exported, tmp_path, algorithm):
        path = modelopt(exported, tmp_path / "modelopt", algorithm)
        with pytest.raises(ValueError, match=f"quant_algo {algorithm!r}; load_packed reads"):
            load_packed(path)

    def test_decode_scales_of_modelopt(self, exported, tmp_path):
        path = modelopt(exported, tmp_path / "modelopt", "W4A16_NVFP4")
        rewrite(path, setting("weight_scale_2", torch.zeros_like))
        with pytest.raises(ValueError, match=rf"{UP}.weight_scale_2 is 0.0"):
            load_packed(path)

    def test_a_dense_checkpoint(self, tmp_path):
        llama().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="is not quantized"):
            load_packed(tmp_path)

    def test_a_zero_block_is_no_damage(self, checkpoint):
        name = f"{UP}.weight_scale"
        model = load_packed(rewrite(checkpoint, setting("weight_scale", fp8(0))))
        assert name in model.state_dict()
        assert not model.get_submodule(UP).weight[0].any()

    def test_a_packed_head_that_is_tied(self, checkpoint):
        def change(tensors):
            packed = PackedWeight.of(torch.randn(VOCAB, 64))
            for part, tensor in zip(("packed", "scale", "global_scale"), packed):
                tensors[f"lm_head.weight_{part}"] = tensor

        with pytest.raises(ValueError, match="lm_head is packed, and the config ties"):
            load_packed(rewrite(checkpoint, change))

    def test_kv_cache_scheme_is_left_out_with_a_warning(self, checkpoint, tmp_path):
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        rewrite(checkpoint, lambda tensors: None, lambda c: c.update(kv_cache_scheme=scheme))
        with pytest.warns(UserWarning, match="kv_cache_scheme=.* is not emulated"):
            model = load_packed(checkpoint)
        model.save_pretrained(tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["quantization_config"]["kv_cache_scheme"] is None

    def test_fused_experts(self, tmp_path):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
            )
        )  # fmt: skip
        model.save_pretrained(tmp_path)

        def change(tensors):
            name = "model.layers.0.block_sparse_moe.experts.0.w1"
            packed = PackedWeight.of(tensors.pop(f"{name}.weight").float())
            for part, tensor in zip(("packed", "scale", "global_scale"), packed):
                tensors[f"{name}.weight_{part}"] = tensor

        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4_ARGS}},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        rewrite(tmp_path, change)
        with pytest.raises(ValueError, match=r"experts.0.w1 belongs to .* one fused tensor"):
            load_packed(tmp_path)


def test_isinstance_of_no_linear():
    """transformers and PEFT must not take it for an nn.Linear, whose weight is a parameter."""
    assert not issubclass(PackedLinear, nn.Linear)
