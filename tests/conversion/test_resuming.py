"""Resuming from a checkpoint of another scheme, or of a dense model."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import VOCAB, mixtral
from design import some_slow
from safetensors.torch import load_file
from tensors import assert_same

from conversion.architectures import ARCHITECTURES
from conversion.run_tools import converted, dense, metis_callbacks, trainer
from metis_hf import (
    MetisCallback,
    MetisConfig,
    MetisTrainer,
    get_metis_model,
    set_precision,
)
from metis_hf.training.resume import ResumeGuard, guard_loading


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
            ("metis", "nvfp4", r"has a split weight .* for .*_proj and 13 more, .* densely"),
            ("nvfp4", "metis", r"has a dense weight for .*_proj and 13 more, .* as u, s, vh"),
            ("metis", "metis-paper", r"q_proj.u has shape \(64, 32\) .* \(64, 1\) in .* rank 1\."),
            ("nvfp4", "nvidia", r"different config .*scheme='nvfp4' -> 'nvidia'"),
        ],
    )
    def test_schemes(self, before, after, match, runs, tmp_path):
        source = runs(before, lambda: converted(before))
        made = trainer(tmp_path, converted(after))
        with pytest.raises(ValueError, match=match):
            made.train(resume_from_checkpoint=source)
        assert made.state.global_step in (0, 2)  # no step was taken

    def test_a_field_that_decides_what_is_trained(self, runs, tmp_path):
        source = runs("nvfp4", lambda: converted("nvfp4"))
        for name, value in {
            "format": "mxfp4",
            "two_level": False,
            "attention": "nvfp4-rne",
            "outer_scale": "token",
        }.items():
            made = trainer(tmp_path, converted("nvfp4", **{name: value}))
            match = rf"different config .*{name}=.* -> .*from_pretrained"
            with pytest.raises(ValueError, match=match):
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

    @pytest.mark.parametrize(
        ("scheme", "save_only_model", "match"),
        [
            ("metis", True, r"split weight .*no converted layer there"),
            ("nvfp4", False, r"with scheme 'nvfp4'.*no converted layer"),  # names and shapes fit
        ],
    )
    def test_dense_model_from_a_metis_checkpoint(
        self, scheme, save_only_model, match, runs, tmp_path
    ):
        options = {"save_only_model": save_only_model}
        source = runs(f"{scheme}-{save_only_model}", lambda: converted(scheme), **options)
        made = trainer(tmp_path, dense(), (ResumeGuard,), **options)
        with pytest.raises(ValueError, match=match):
            made.train(resume_from_checkpoint=source)

    def test_a_callback_of_another_name(self, runs, tmp_path):
        class Mine(MetisCallback):
            """A user's own."""

        source = runs("nvfp4", lambda: converted("nvfp4"))
        made = trainer(tmp_path, converted("nvidia"), (Mine(health_interval=0),))
        with pytest.raises(ValueError, match=r"different config .*scheme='nvfp4' -> 'nvidia'"):
            made.train(resume_from_checkpoint=source)

    def test_metis_model_from_a_dense_checkpoint(self, runs, tmp_path):
        source = runs("dense", dense)
        made = trainer(tmp_path, converted())
        with pytest.raises(ValueError, match=r"dense weight .*as u, s, vh"):
            made.train(resume_from_checkpoint=source)

    def test_converted_experts(self):
        """Fused experts are replaced by layers of another name."""
        config = MetisConfig(scheme="nvfp4", target_modules=["down_proj"])
        state = get_metis_model(mixtral(), config).state_dict()
        plain = mixtral()
        guard_loading(plain)
        guard_loading(plain)
        assert len(plain._load_state_dict_pre_hooks) == 1
        with pytest.raises(ValueError, match=r"converted experts .*metis_down_proj.0.weight and 1"):
            plain.load_state_dict(state, strict=False)

    @pytest.mark.parametrize(
        ("kind", "size"),
        [("one by one", "1GB"), ("base", "20KB"), ("fused", "20KB"), ("transposed", "20KB")],
    )
    def test_experts_that_are_not_converted(self, kind, size, tmp_path):
        """transformers saves Mixtral's one by one; Qwen3-VL's may lie transposed."""
        options = dict(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
        cls = transformers.MixtralForCausalLM
        config = transformers.MixtralConfig(**options, num_local_experts=2)
        if kind == "transposed":
            cls = transformers.Qwen3VLMoeForConditionalGeneration
            vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4,
                      "out_hidden_size": 64, "deepstack_visual_indexes": [0]}  # fmt: skip
            text = options | {"num_experts": 2, "num_experts_per_tok": 1}
            text["moe_intermediate_size"] = 48
            config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
        plain = cls(config)
        model = get_metis_model(cls(config), MetisConfig(scheme="nvfp4"))
        guard_loading(model)
        source = plain.model if kind == "base" else plain
        source.save_pretrained(tmp_path, max_shard_size=size)
        shards = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
        if kind == "fused":
            shards = [plain.state_dict()]
        names = r"\S*layers\.\d\.mlp\.experts\.(down|gate_up)_proj"
        match = rf"has fused experts \({names}.* has a converted layer for each expert\. Convert"
        shard = next(shard for shard in shards if any(".experts." in key for key in shard))
        with pytest.raises(ValueError, match=match):
            model.load_state_dict(shard, strict=False)

    NAMED = (
        *((name, False, "20KB") for name in ARCHITECTURES),
        *((name, True, "20KB") for name, each in ARCHITECTURES.items() if each.mixture),
        ("mixtral", False, "1GB"),
    )
    # Decoders that are saved under their own names; llama and gpt2 stand for them.
    LIKE_LLAMA = tuple((name, False, "20KB") for name in (
        "llama-tied", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral", "phi3", "opt",
        "gpt-neox",
    ))  # fmt: skip

    @pytest.mark.parametrize(("name", "kept", "size"), some_slow(NAMED, LIKE_LLAMA))
    def test_names_of_the_files(self, name, kept, size, tmp_path):
        """transformers saves some models under other names, and experts one by one.

        Trainer loads what it finds in the files, and passes over names that it does not know.
        """
        build = ARCHITECTURES[name].build
        names = ["experts"] if kept else None
        models = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            config = MetisConfig(scheme="nvfp4", modules_to_not_convert=names)
            models.append(get_metis_model(build(), config))
        saved, other = models
        saved.save_pretrained(tmp_path, max_shard_size=size)
        guard_loading(other)
        shards = sorted(tmp_path.glob("*.safetensors"))
        assert (len(shards) > 1) == (size == "20KB")
        for shard in shards:
            found = other.load_state_dict(load_file(shard), strict=False)
            assert not found.unexpected_keys
        assert_same(saved, other)

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
        assert_same(whole.model, resumed.model)
        wrong = trainer(tmp_path / "wrong", converted("nvfp4"), callbacks)
        with pytest.raises(ValueError, match=r"scheme='nvidia' -> 'nvfp4'"):
            wrong.train(resume_from_checkpoint=source)

    def test_a_model_made_by_trainer(self, runs, tmp_path):
        source = runs("metis-init", lambda: converted("metis"))
        made = trainer(tmp_path, lambda: converted("nvfp4"), (), cls=MetisTrainer)
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
