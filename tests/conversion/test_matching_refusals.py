"""What get_metis_model refuses; the model is then unchanged."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

from conversion.test_matching import HouseLinear, build, chosen_by_peft, selected
from metis_hf import MetisConfig, get_metis_model, metis_layers


class TestRefused:
    """Each: what was asked, what is true, what to do; nothing of the model has changed."""

    @staticmethod
    def refused(match: str, model: nn.Module | None = None, **options) -> None:
        model = build() if model is None else model
        modules = {name: id(module) for name, module in model.named_modules()}
        params = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
        config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
        with pytest.raises(ValueError, match=match):
            get_metis_model(model, MetisConfig(**options))
        assert {name: id(module) for name, module in model.named_modules()} == modules
        assert {name: id(p) for name, p in model.named_parameters()} == {
            name: identity for name, (identity, _) in params.items()
        }
        assert all(torch.equal(p, params[name][1]) for name, p in model.named_parameters())
        if config is not None:
            assert model.config.to_dict() == config
        assert not model._forward_pre_hooks

    @pytest.mark.parametrize("targets", ["all-linear", r".*q_proj"])
    def test_blocks_with_a_string(self, targets):
        """PEFT refuses it too."""
        message = r"layers_to_transform=\[0\] has no effect with target_modules='.*list"
        self.refused(message, target_modules=targets, layers_to_transform=[0])
        with pytest.raises(ValueError, match="layers_to_transform"):
            peft.LoraConfig(target_modules=targets, layers_to_transform=[0])

    def test_layers_pattern_alone(self):
        message = "layers_pattern='layers' without layers_to_transform has no effect"
        self.refused(message, target_modules=["q_proj"], layers_pattern="layers")

    def test_full_name_with_blocks(self):
        """PEFT ignores the indices for that module."""
        name = "model.layers.0.self_attn.q_proj"
        options = {"target_modules": [name, "up_proj"], "layers_to_transform": [1]}
        self.refused(f"names {name} in full, so layers_to_transform does not apply", **options)
        assert name in chosen_by_peft(build(), **options)

    @pytest.mark.parametrize("pattern", [None, "layers"])
    def test_block_that_does_not_exist(self, pattern):
        """PEFT ignores an index beside one that exists."""
        options = {"target_modules": ["q_proj"], "layers_pattern": pattern}
        self.refused("layers_to_transform has 7", layers_to_transform=[0, 7], **options)

    @pytest.mark.parametrize(
        ("name", "target", "blocks"), [("llama", "q_proj", "layers"), ("gpt2", "c_attn", "h")]
    )
    def test_blocks_of_a_base_model(self, name, target, blocks):
        """PEFT finds none either, and all with `layers_pattern`."""
        options = {"target_modules": [target], "layers_to_transform": [1]}
        message = rf"{blocks}\.0\..*{target} is in no block.*Give layers_pattern='{blocks}' too"
        self.refused(message, build(name).base_model, **options)
        with pytest.raises(ValueError, match="not found in the base model"):
            chosen_by_peft(build(name).base_model, **options)
        options["layers_pattern"] = blocks
        expected = chosen_by_peft(build(name).base_model, **options)
        assert len(expected) == 1
        assert selected(build(name).base_model, **options) == expected

    def test_list_of_blocks_that_does_not_exist(self):
        options = {"target_modules": ["q_proj"], "layers_to_transform": [0]}
        self.refused(r"has 0 \(layers_pattern='h'\), but no block", layers_pattern="h", **options)

    def test_unknown_target_beside_a_known_one(self):
        message = "target_modules names 'q_porj', which is no module of LlamaForCausalLM.*q_proj"
        self.refused(message, target_modules=["q_proj", "q_porj"])

    def test_regex_that_matches_nothing(self):
        self.refused("selects no layer of LlamaForCausalLM", target_modules=r".*query")

    @pytest.mark.parametrize("names", [["k_porj"], r".*k_porj", "k_proj"])
    def test_unknown_exclusion(self, names):
        """The last: a regular expression has to match the full name."""
        self.refused("exclude_modules.*no module.*would be converted", exclude_modules=names)

    @pytest.mark.parametrize("names", [["mlp"], r".*\.mlp", ["q_proj", "layers.0"]])
    def test_exclusion_of_what_holds_layers(self, names):
        message = r"which names no layer but what holds some, such as .*\.\w+_proj; these would be"
        self.refused(f"{message} converted.*modules_to_not_convert", exclude_modules=names)

    @pytest.mark.parametrize(
        ("names", "left"),
        [
            (["embed_tokens"], set()),
            (["norm", "lm_head"], set()),
            (r".*(mlp|up_proj)", {"up_proj"}),
        ],
    )
    def test_exclusion_that_loses_nothing(self, names, left):
        """What it names stays anyhow, or is a layer beside what holds some."""
        fewer = selected(build()) - selected(build(), exclude_modules=names)
        assert {name.rsplit(".", 1)[1] for name in fewer} == left

    def test_everything_excluded(self):
        self.refused("selects no layer", target_modules=["q_proj"], exclude_modules=["q_proj"])

    def test_unknown_name_in_modules_to_not_convert(self):
        message = "modules_to_not_convert names 'atention', which is no module"
        self.refused(message, modules_to_not_convert=["atention"])

    @pytest.mark.parametrize(
        ("option", "value"), [("rank_pattern", 4), ("scheme_pattern", "nvidia")]
    )
    def test_pattern_that_applies_to_nothing(self, option, value):
        message = f"{option} has 'c_attn', which applies to no converted layer.*q_proj"
        self.refused(message, **{option: {"c_attn": value}})
        # Hidden behind an earlier one, or only of layers that stay as they are.
        self.refused("has 'q_proj', which", **{option: {".*_proj": value, "q_proj": value}})
        self.refused("has 'lm_head', which", **{option: {"lm_head": value}})

    def test_unknown_scheme_in_a_pattern(self):
        self.refused("'nvdia' is not registered.*'nvidia'", scheme_pattern={"q_proj": "nvdia"})

    def test_container_as_target(self):
        self.refused("model.layers.0.mlp is a LlamaMLP; only", target_modules=["mlp"])

    def test_lookalike_as_target(self):
        model = build()
        model.model.layers[0].mlp.up_proj = HouseLinear(64, 96)
        model.model.layers[1].mlp.up_proj = HouseLinear(64, 96)
        self.refused(
            "up_proj is a HouseLinear; its class HouseLinear has a forward",
            model,
            target_modules=["up_proj"],
        )

    def test_tied_head_as_target_of_factors(self):
        message = "lm_head shares its weight with model.embed_tokens"
        targets = ["q_proj", "lm_head"]
        self.refused(message, build("llama-tied"), target_modules=targets, split_weight=True)

    def test_absolute_rank_too_large(self):
        """k_proj is 64 -> 32: half of 32 is the most."""
        message = r"rank=17 keeps 17 of 32 directions of .*k_proj; choose at most 16"
        self.refused(message, rank=17)
        message = r"rank=33 keeps 33 of 64 directions of .*down_proj; choose at most 32"
        self.refused(message, rank_pattern={"down_proj": 33})

    def test_share_too_large(self):
        message = r"rank_frac=0.75 keeps 48 of 64 directions of .*q_proj; choose at most 0.5"
        self.refused(message, rank_frac=0.75)

    def test_rank_of_an_expert_too_large(self):
        message = r"rank=40 keeps 40 of 64 directions of .*experts.down_proj; choose at most 32"
        self.refused(message, build("mixtral"), rank_pattern={"experts.down_proj": 40})

    def test_non_finite_expert(self):
        model = build("mixtral")
        model.model.layers[1].mlp.experts.down_proj.data[2, 0, 0] = float("inf")
        self.refused(r"layers.1.mlp.experts.down_proj: the weight has NaN or inf", model)

    def test_converted_twice(self):
        model = get_metis_model(build("mixtral"), MetisConfig(scheme="nvfp4"))
        names = [name for name, _ in metis_layers(model)]
        with pytest.raises(ValueError, match=r"converted already.*'nvfp4'.*to_dense"):
            get_metis_model(model, MetisConfig())
        assert [name for name, _ in metis_layers(model)] == names
        assert model.config.quantization_config.scheme == "nvfp4"

    def test_wrapped_by_ddp(self, tmp_path):
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
        )
        try:
            wrapped = nn.parallel.DistributedDataParallel(build())
            self.refused(r"wrapped already \(DistributedDataParallel\): convert before", wrapped)
        finally:
            dist.destroy_process_group()

    def test_wrapped_by_compile(self):
        compiled = torch.compile(build(), backend="eager")
        self.refused(r"the model is wrapped already \(OptimizedModule\)", compiled)

    def test_one_block_wrapped(self):
        model = build()
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
        self.refused(r"model.layers.1 is wrapped already \(OptimizedModule\)", model)
