"""Checkpoints that are damaged, cut off, sharded, of another dtype, or of another scheme."""

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
    MetisTrainer,
    calibrate,
    get_metis_model,
    metis_layers,
    set_precision,
)
from metis_hf.training.resume import ResumeGuard, last_checkpoint

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


class TestMixedSchemes:
    """Resuming from another scheme's checkpoint: never silently, never torch's own riddle."""

    @pytest.fixture(scope="class")
    def runs(self, tmp_path_factory):
        """A directory with a finished run of each kind, made on demand."""
        root = tmp_path_factory.mktemp("runs")

        def run(name, build, **options):
            if not (root / name).exists():
                callbacks = (ResumeGuard,) if name.startswith("dense") else None
                trainer(root / name, build(), callbacks, max_steps=2, **options).train()
            return str(root / name / "checkpoint-2")

        return run

    @pytest.mark.parametrize(
        ("before", "after", "match"),
        [
            (
                "metis",
                "nvfp4",
                r"has a split weight .* for .*_proj and 13 more, .* stores it densely",
            ),
            ("nvfp4", "metis", r"has a dense weight for .*_proj and 13 more, .* as u, s, vh"),
            ("metis", "metis-paper", r"q_proj.u has shape \(64, 32\) .* \(64, 1\) in .* rank 1\."),
            ("nvfp4", "nvidia", r"another config .*scheme='nvfp4' -> 'nvidia'"),
            ("bf16-split", "metis", r"another config .*scheme='bf16-split' -> 'metis'"),
        ],
    )
    def test_schemes(self, before, after, match, runs, tmp_path):
        source = runs(before, lambda: converted(before))
        made = trainer(tmp_path, converted(after))
        with pytest.raises(ValueError, match=match):
            made.train(resume_from_checkpoint=source)
        assert made.state.global_step in (0, 2)  # no step was taken

    @pytest.mark.parametrize(
        "changes",
        [
            {"format": "mxfp4"},
            {"two_level": False},
            {"operand_mode": "contraction"},
            {"sample_frac": 0.5},
            {"attention": "nvfp4-rne"},
            {"outer_scale": "token"},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_a_field_that_decides_what_is_trained(self, changes, runs, tmp_path):
        source = runs("nvfp4", lambda: converted("nvfp4"))
        made = trainer(tmp_path, converted("nvfp4", **changes))
        (name,) = changes
        with pytest.raises(ValueError, match=rf"another config .*{name}=.* -> .*from_pretrained"):
            made.train(resume_from_checkpoint=source)

    def test_same_tensors_in_other_units(self, runs, tmp_path):
        """The names and shapes agree; a factor of 1 / sqrt(out in) does not."""
        source = runs("metis-8", lambda: converted("metis", rank=8))
        made = trainer(tmp_path, converted("metis-paper", rank=8))
        with pytest.raises(ValueError, match=r"scheme='metis' -> 'metis-paper'.*from_pretrained"):
            made.train(resume_from_checkpoint=source)

    def test_what_a_resumed_run_may_change(self, runs, tmp_path):
        source = runs("metis-8", lambda: converted("metis", rank=8))
        model = converted(
            "metis", rank=8, high_precision=["forward"], refresh_interval=3, seed=4,
            backward_rounding="nearest",
        )  # fmt: skip
        made = trainer(tmp_path, model, max_steps=3)
        made.train(resume_from_checkpoint=source)
        assert made.state.global_step == 3

    @pytest.mark.parametrize("save_only_model", [True, False])
    def test_dense_model_from_a_metis_checkpoint(self, save_only_model, runs, tmp_path):
        source = runs(f"metis-{save_only_model}", converted, save_only_model=save_only_model)
        made = trainer(tmp_path, dense(), (ResumeGuard,), save_only_model=save_only_model)
        with pytest.raises(ValueError, match=r"split weight .*no converted layer there"):
            made.train(resume_from_checkpoint=source)

    def test_dense_model_from_a_checkpoint_of_whole_weights(self, runs, tmp_path):
        """Its tensors have the names and shapes of the dense model's."""
        source = runs("nvfp4", lambda: converted("nvfp4"))
        made = trainer(tmp_path, dense(), (ResumeGuard,))
        with pytest.raises(ValueError, match=r"in scheme 'nvfp4'.*no converted layer"):
            made.train(resume_from_checkpoint=source)

    def test_a_callback_of_another_name(self, runs, tmp_path):
        class Mine(MetisCallback):
            """A user's own."""

        source = runs("nvfp4", lambda: converted("nvfp4"))
        made = trainer(tmp_path, converted("nvidia"), (Mine(health_interval=0),))
        with pytest.raises(ValueError, match=r"another config .*scheme='nvfp4' -> 'nvidia'"):
            made.train(resume_from_checkpoint=source)

    def test_metis_model_from_a_dense_checkpoint(self, runs, tmp_path):
        source = runs("dense", dense)
        made = trainer(tmp_path, converted())
        with pytest.raises(ValueError, match=r"dense weight .*as u, s, vh"):
            made.train(resume_from_checkpoint=source)

    def test_converted_experts(self):
        """Fused experts are replaced by layers of another name."""
        from metis_hf.training.resume import guard_loading

        config = transformers.MixtralConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
        )  # fmt: skip
        state = get_metis_model(
            transformers.MixtralForCausalLM(config),
            MetisConfig(scheme="nvfp4", target_modules=["down_proj"]),
        ).state_dict()
        plain = transformers.MixtralForCausalLM(config)
        guard_loading(plain)
        guard_loading(plain)
        assert len(plain._load_state_dict_pre_hooks) == 1
        with pytest.raises(ValueError, match=r"converted experts .*metis_down_proj.0.weight and 1"):
            plain.load_state_dict(state, strict=False)

    def test_a_scheme_that_was_changed_on_the_way(self, tmp_path):
        """The checkpoint has the scheme that it was written in, and a model from it resumes."""

        class Change(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, model=None, **kwargs):
                if state.global_step == 1:
                    set_precision(model, scheme="nvidia")

        callbacks = (*metis_callbacks(), Change())
        whole = trainer(tmp_path, converted("nvfp4"), callbacks)
        whole.train()
        source = str(tmp_path / "checkpoint-2")
        model = transformers.AutoModelForCausalLM.from_pretrained(source)
        resumed = trainer(tmp_path / "again", model, callbacks)
        resumed.train(resume_from_checkpoint=source)
        for key, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[key]), key
        wrong = trainer(tmp_path / "wrong", converted("nvfp4"), callbacks)
        with pytest.raises(ValueError, match=r"scheme='nvidia' -> 'nvfp4'"):
            wrong.train(resume_from_checkpoint=source)

    def test_a_model_made_by_trainer(self, runs, tmp_path):
        source = runs("metis-init", lambda: converted("metis"))
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, use_cpu=True, report_to="none", disable_tqdm=True
        )
        made = MetisTrainer(
            args=arguments, train_dataset=Rows(), model_init=lambda: converted("nvfp4")
        )
        with pytest.raises(ValueError, match=r"has a split weight .* stores it densely"):
            made.train(resume_from_checkpoint=source)

    def test_a_checkpoint_of_a_run_without_the_callback(self, tmp_path):
        """Nothing to compare with: it resumes, and its own checkpoints have the config."""
        trainer(tmp_path, converted(), (), max_steps=2).train()
        made = trainer(tmp_path, converted())
        made.train(resume_from_checkpoint=True)
        state = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
        saved = state["stateful_callbacks"]["MetisCallback"]["attributes"]["trained_config"]
        assert MetisConfig.from_dict(saved) == MetisConfig(split_weight=True)


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
