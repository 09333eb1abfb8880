"""Checkpoints that are damaged, cut off, sharded, or of another dtype."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import llama
from safetensors.torch import load_file, save_file
from tensors import assert_same, logits

from conversion.run_tools import LAYER, converted, dense, load, trainer
from metis_hf import MetisConfig, calibrate, get_metis_model, metis_layers
from metis_hf.training.resume import last_checkpoint

BF16_ROUNDING = 2.0**-8


@pytest.fixture
def saved(tmp_path):
    """(directory, a function that writes other tensors there)."""
    converted().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    return tmp_path, lambda state: save_file(state, path, {"format": "pt"})


def change_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))


def lose(file, key):
    """Take a tensor out of a file."""
    state = load_file(file)
    del state[key]
    save_file(state, file, {"format": "pt"})


class TestDamaged:
    def test_newer_config_version(self, saved):
        directory, _ = saved
        change_config(directory, format_version=MetisConfig.format_version + 1)
        with pytest.raises(ValueError, match=r"format_version 2, .* up to 1; upgrade"):
            load(directory)

    @pytest.mark.parametrize(
        ("scheme", "key"),
        [("metis", "vh"), ("metis", "weight_residual"), ("nvfp4", "weight"),
         ("w4a4", "weight_amax"), ("w4a4", "scales_frozen")],
    )  # fmt: skip
    def test_missing_tensor(self, scheme, key, tmp_path):
        """Of calibrated scales that stand at 0 a layer would compute zeros."""
        model = converted(scheme)
        if scheme == "w4a4":
            calibrate(model, [torch.arange(32)[None]])
        model.save_pretrained(tmp_path)
        lose(tmp_path / "model.safetensors", f"{LAYER}.{key}")
        with pytest.raises(ValueError, match=rf"{tmp_path} lacks .*: {LAYER}\.{key}\. .*restore"):
            load(tmp_path)

    def test_dense_weights_under_a_metis_config(self, saved):
        directory, write = saved
        write(dense().state_dict())
        with pytest.raises(ValueError, match=r"lacks tensors of .* layers: .* and 52 more\. "):
            load(directory)

    def test_what_is_missing_elsewhere_is_transformers_business(self, saved):
        """A new head on a pretrained body is ordinary fine-tuning."""
        directory, _ = saved
        lose(directory / "model.safetensors", "lm_head.weight")
        _, info = load(directory, output_loading_info=True)
        assert info["missing_keys"] == {"lm_head.weight"}
        transformers.AutoModelForSequenceClassification.from_pretrained(directory)

    def test_factors_of_another_rank(self, saved):
        directory, _ = saved
        change_config(directory, rank=8)
        match = (
            r"(u|s|vh) has shape \(.*32.*\) in .*model.safetensors, "
            r"but its config.json requires \(.*8.*\)"
        )
        for ignore in (False, True):
            with pytest.raises(ValueError, match=match):
                load(directory, ignore_mismatched_sizes=ignore)


class TestForms:
    """Sharded, bf16 and fp32 checkpoints, and the dtype asked for on load."""

    def test_sharded(self, tmp_path):
        model = converted().eval()
        model.save_pretrained(tmp_path, max_shard_size="50KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
        assert_same(model, load(tmp_path))
        shard = next(path for path in sorted(tmp_path.glob("model-*")) if any(
            key.endswith(".vh") for key in load_file(path)))  # fmt: skip
        name = next(key for key in load_file(shard) if key.endswith(".vh"))
        lose(shard, name)
        with pytest.raises(ValueError, match=f"lacks .*{name}"):
            load(tmp_path)

    def test_dtype_is_kept(self, tmp_path, token_ids):
        model = converted().eval()
        for param in model.parameters():  # `model.to` would round the rotary frequencies too
            param.data = param.data.to(torch.bfloat16)
        model.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        assert_same(model, loaded)
        assert torch.equal(logits(model, token_ids), logits(loaded, token_ids))

    def test_dtype_on_load(self, tmp_path):
        model = converted()
        model.save_pretrained(tmp_path)
        rounded = load(tmp_path, dtype=torch.bfloat16)
        assert_same(converted().to(torch.bfloat16), rounded)
        for (_, layer), (_, original) in zip(
            metis_layers(rounded), metis_layers(model), strict=True
        ):
            size = original.weight.abs().max().item()
            torch.testing.assert_close(
                layer.weight.float(), original.weight, rtol=0, atol=2 * BF16_ROUNDING * size
            )
        rounded.save_pretrained(tmp_path / "bf16")
        again = load(tmp_path / "bf16", dtype=torch.float32)
        assert {p.dtype for p in again.parameters()} == {torch.float32}
        assert_same(rounded.float(), again)


class TestTrainer:
    @pytest.mark.slow
    def test_save_only_model(self, tmp_path):
        """Weights alone: they load, and a resumed run continues with a new optimizer."""
        made = trainer(tmp_path, converted(), save_only_model=True)
        made.train()
        assert not list((tmp_path / "checkpoint-2").glob("optimizer*"))
        assert_same(made.model, load(tmp_path / "checkpoint-4"))
        again = trainer(tmp_path, converted(), save_only_model=True, max_steps=5)
        again.train(resume_from_checkpoint=last_checkpoint(tmp_path))
        assert again.state.global_step == 5

    @pytest.mark.slow
    def test_sharded_checkpoint_resumes(self, tmp_path):
        """Trainer's own loading of shards, each of which holds a part of the tensors."""
        whole = trainer(tmp_path / "whole", converted())
        whole.train()
        directory = tmp_path / "whole/checkpoint-2"
        model = load(directory)
        (directory / "model.safetensors").unlink()
        model.save_pretrained(directory, max_shard_size="50KB")
        resumed = trainer(tmp_path / "cut", converted(seed=0))
        resumed.train(resume_from_checkpoint=str(directory))
        assert_same(whole.model, resumed.model)


@pytest.mark.parametrize("scheme", ["metis-paper", "w4a4"])
def test_part_of_a_model_on_disk(scheme, tmp_path, token_ids):
    """`device_map` with disk: what is offloaded is not missing."""
    model = get_metis_model(llama(), MetisConfig(scheme=scheme)).eval()
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu",
              "lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}  # fmt: skip
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(logits(again, token_ids), logits(model, token_ids))


@pytest.mark.parametrize(
    "names",
    [
        {"modules_to_not_convert": ["lm_head"]},
        {"scheme_pattern": {"lm_head": "bf16"}, "target_modules": ["q_proj", "lm_head"]},
    ],
)
def test_a_part_without_the_head_that_the_config_names(names, tmp_path):
    model = get_metis_model(llama(), MetisConfig(scheme="nvfp4", **names))
    model.save_pretrained(tmp_path)
    part = transformers.AutoModel.from_pretrained(tmp_path)
    expected = [name for name, _ in metis_layers(model) if name != "lm_head"]
    assert [f"model.{name}" for name, _ in metis_layers(part)] == expected
