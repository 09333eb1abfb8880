"""Checkpoints that are damaged, cut off, sharded, or of another dtype."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import VOCAB, llama
from safetensors.torch import load_file, save_file

from metis_hf import (
    MetisCallback,
    MetisConfig,
    calibrate,
    get_metis_model,
    metis_layers,
)
from metis_hf.training.resume import last_checkpoint

FACTORS = ("u", "s", "vh", "weight_residual")
LAYER = "model.layers.1.mlp.up_proj"
BF16_ROUNDING = 2.0**-8


class Rows(torch.utils.data.Dataset):
    """Fixed random sequences."""

    def __init__(self, count=64, length=32):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCAB, (count, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def metis_callbacks():
    return (MetisCallback(health_interval=0),)


def trainer(path, model, callbacks=None, **changes):
    options = {
        "max_steps": 4,
        "save_steps": 2,
        "save_strategy": "steps",
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    } | changes
    args = transformers.TrainingArguments(str(path), **options)
    rows = Rows()
    return transformers.Trainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(metis_callbacks() if callbacks is None else callbacks),
    )


def converted(scheme="metis", **config):
    """Metis with stored factors, which a checkpoint has more to lose of."""
    torch.manual_seed(0)
    if scheme == "metis":
        config = {"split_weight": True, **config}
    return get_metis_model(llama(), MetisConfig(scheme=scheme, **config))


def dense():
    torch.manual_seed(0)
    return llama()


def load(path, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)


def assert_same(model, other):
    state = other.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.fixture
def saved(tmp_path):
    """(directory, its tensors, a function that writes tensors back)."""
    converted().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    return tmp_path, load_file(path), lambda state: save_file(state, path, {"format": "pt"})


class TestDamaged:
    def test_newer_config_version(self, saved):
        directory, _, _ = saved
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"]["format_version"] = MetisConfig.format_version + 1
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"format_version 2, .* reads up to 1; upgrade"):
            load(directory)

    @pytest.mark.parametrize("factor", FACTORS)
    def test_missing_factor(self, factor, saved):
        directory, state, write = saved
        del state[f"{LAYER}.{factor}"]
        write(state)
        with pytest.raises(
            ValueError, match=rf"{directory} lacks .*: {LAYER}\.{factor}\. .*restore"
        ):
            load(directory)

    def test_missing_dense_weight(self, tmp_path):
        converted("nvfp4").save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        del state[f"{LAYER}.weight"]
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=rf"lacks .*{LAYER}\.weight"):
            load(tmp_path)

    @pytest.mark.parametrize("buffer", ["input_amax", "weight_amax", "scales_frozen"])
    def test_missing_state(self, buffer, tmp_path):
        """Of calibrated scales that stand at 0 a layer would compute zeros."""
        model = converted("w4a4")
        calibrate(model, [torch.arange(32)[None]])
        model.save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        del state[f"{LAYER}.{buffer}"]
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=rf"lacks .*: {LAYER}\.{buffer}\. .*restore"):
            load(tmp_path)

    def test_dense_weights_under_a_metis_config(self, saved):
        directory, _, write = saved
        write(dense().state_dict())
        with pytest.raises(ValueError, match=r"lacks tensors of converted layers: .*\.\.\. \(56\)"):
            load(directory)

    def test_what_is_missing_elsewhere_is_transformers_business(self, saved):
        """A new head on a pretrained body is ordinary fine-tuning."""
        directory, state, write = saved
        del state["lm_head.weight"]
        write(state)
        _, info = load(directory, output_loading_info=True)
        assert info["missing_keys"] == {"lm_head.weight"}
        transformers.AutoModelForSequenceClassification.from_pretrained(directory)

    @pytest.mark.parametrize("ignore", [False, True])
    def test_factors_of_another_rank(self, ignore, saved):
        directory, _, _ = saved
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"]["rank"] = 8
        (directory / "config.json").write_text(json.dumps(config))
        match = r"(u|s|vh) has shape \(.*32.*\) in .*model.safetensors, and \(.*8.*\) by the config"
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
        state = load_file(shard)
        name = next(key for key in state if key.endswith(".vh"))
        del state[name]
        save_file(state, shard, {"format": "pt"})
        with pytest.raises(ValueError, match=f"lacks .*{name}"):
            load(tmp_path)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_dtype_is_kept(self, dtype, tmp_path, token_ids):
        model = converted().eval()
        for param in model.parameters():  # `model.to` would round the rotary frequencies too
            param.data = param.data.to(dtype)
        model.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        assert {p.dtype for p in loaded.parameters()} == {dtype}
        assert_same(model, loaded)
        with torch.no_grad():
            assert torch.equal(model(token_ids).logits, loaded(token_ids).logits)

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


@pytest.mark.parametrize("scheme", ["nvfp4", "metis-paper", "w4a4"])
def test_part_of_a_model_on_disk(scheme, tmp_path, token_ids):
    """`device_map` with disk: what is offloaded is not missing."""
    model = get_metis_model(llama(), MetisConfig(scheme=scheme)).eval()
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu",
              "lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}  # fmt: skip
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize(
    "names",
    [{"modules_to_not_convert": ["lm_head"]}, {"exclude_modules": ["lm_head"]},
     {"scheme_pattern": {"lm_head": "bf16"}, "target_modules": ["q_proj", "lm_head"]}],
)  # fmt: skip
def test_a_part_without_the_head_that_the_config_names(names, tmp_path):
    model = get_metis_model(llama(), MetisConfig(scheme="nvfp4", **names))
    model.save_pretrained(tmp_path)
    part = transformers.AutoModel.from_pretrained(tmp_path)
    expected = [name for name, _ in metis_layers(model) if name != "lm_head"]
    assert [f"model.{name}" for name, _ in metis_layers(part)] == expected
