"""LoRA over a packed base: training, saving, and what a merge costs."""

from __future__ import annotations

import json
import math

import pytest
import torch
from peft import LoraConfig, PeftModel
from tensors import same
from training import trainer_tools

from conversion.packed_tools import LAYERS, base_bytes, dense_twin, ids, lora, with_adapter
from metis_hf import (
    MetisConfig,
    calibrate,
    get_metis_model,
    load_packed,
    merge_packed,
    metis_layers,
    to_dense,
)
from metis_hf.layers.packed import PackedWeight, packed_layers


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
        with pytest.raises(ValueError, match=r"would train .*q_proj in full"):
            lora(load_packed(exported), target_modules=["v_proj"], modules_to_save=["q_proj"])


def trainer(model, folder, **options):
    data = [{"input_ids": row, "labels": row} for row in ids(8)]
    options |= {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 0.02}
    return trainer_tools.trainer(folder, model, data=data, **options)


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
        with pytest.raises(ValueError, match=r"in NVFP4 and frozen.*to_dense\(model\) first"):
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

    @pytest.mark.parametrize("by_name", [False, True])
    def test_layers_without_this_adapter_keep_their_scale(self, by_name, exported):
        """And so do those that vLLM fuses with them; the report is of those that change."""
        model = load_packed(exported)
        attention = [block.self_attn for block in model.model.layers]
        layers = [getattr(a, f"{n}_proj") for a in attention for n in "qkv"]
        for layer in layers:
            layer.weight_global_scale.fill_(9000.0)
        model = lora(model, target_modules=["q_proj", "k_proj", "v_proj"])
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
        if not by_name:
            model.set_adapter("second")
        names = ["second"] if by_name else None
        merged, report = merge_packed(model, requantize=True, adapter_names=names)
        attention = [block.self_attn for block in merged.model.layers]
        found = [getattr(a, f"{n}_proj") for a in attention for n in "qkv"]
        assert {float(layer.weight_global_scale) for layer in found} == {9000.0}
        assert len(report.layers) == len(attention)
        assert all(each.name.endswith("q_proj") for each in report.layers)
        assert not any(hasattr(layer, "base_layer") for layer in found)
        with pytest.raises(ValueError, match=r"has no adapter named \['third'\] on a packed"):
            merge_packed(lora(load_packed(exported)), adapter_names=["third"])

    def test_dense_merge_is_exact(self, exported):
        model = with_adapter(load_packed(exported, dtype=torch.float32))
        expected = model(ids()).logits
        to_dense(model)
        assert torch.equal(model(ids()).logits, expected)
        plain = model.merge_and_unload()
        torch.testing.assert_close(plain(ids()).logits, expected, rtol=1e-4, atol=1e-5)
        assert not hasattr(plain.config, "quantization_config")
        assert not plain.is_quantized

    def test_merged_and_trained_on(self, exported):
        """What merging costs is trained back: the merged model converts, and trains its weights."""
        model = with_adapter(load_packed(exported, dtype=torch.float32))
        to_dense(model)
        model = model.merge_and_unload().requires_grad_(True)
        model = get_metis_model(model, MetisConfig(scheme="w4a4"))
        calibrate(model, [ids()])
        model.train()(ids(), labels=ids()).loss.backward()
        layers = dict(metis_layers(model))
        assert len(layers) == LAYERS
        assert all(layer.weight.grad.abs().sum() > 0 for layer in layers.values())

    def test_nothing_to_merge(self, exported):
        with pytest.raises(ValueError, match="has no adapter on a packed layer"):
            merge_packed(load_packed(exported), requantize=True)

    @pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "up_proj"])
    def test_bad_adapter(self, target, exported):
        model = lora(load_packed(exported), target_modules=["q_proj", target])
        before = base_bytes(model)
        with torch.no_grad():
            bad = next(p for n, p in model.named_parameters() if target in n and "lora_" in n)
            bad.fill_(math.inf)
        with pytest.raises(ValueError, match=r"NaN or inf.*; nothing was merged") as found:
            merge_packed(model, requantize=True)
        assert target == "up_proj" or target in str(found.value)
        assert same(base_bytes(model), before)
