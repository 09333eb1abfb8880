"""What get_metis_model refuses; the model is then unchanged."""

from __future__ import annotations

import copy
import re

import peft
import pytest
import torch
import torch.distributed as dist
from conftest import llama
from torch import nn

from conversion.selection_tools import HouseLinear, build, chosen_by_peft, selected
from metis_hf import MetisConfig, QuantLinear, get_metis_model

Q_PROJ = "model.layers.0.self_attn.q_proj"
QUERIES = {"target_modules": ["q_proj"]}
HOLDS_LAYERS = (
    r"not a layer but a container of layers such as .*\.\w+_proj; these would be converted"
    ".*modules_to_not_convert"
)
# Message, and the options of a config for a small Llama: each says what was asked, what is true,
# and what to do.
REFUSED = [
    # PEFT refuses it too.
    (r"layers_to_transform=\[0\] has no effect with target_modules='.*list",
     {"target_modules": r".*q_proj", "layers_to_transform": [0]}),
    ("layers_pattern='layers' has no effect without layers_to_transform",
     {**QUERIES, "layers_pattern": "layers"}),
    # PEFT ignores the indices for that module.
    (f"names {re.escape(Q_PROJ)} in full, so layers_to_transform does not apply",
     {"target_modules": [Q_PROJ, "up_proj"], "layers_to_transform": [1]}),
    # PEFT ignores an index beside one that exists.
    ("layers_to_transform has 7", {**QUERIES, "layers_to_transform": [0, 7]}),
    (r"has 0 \(layers_pattern='h'\), but no block",
     {**QUERIES, "layers_to_transform": [0], "layers_pattern": "h"}),
    ("target_modules names 'q_porj', which is not a module of LlamaForCausalLM.*q_proj",
     {"target_modules": ["q_proj", "q_porj"]}),
    ("selects no layer of LlamaForCausalLM", {"target_modules": r".*query"}),
    ("selects no layer", {**QUERIES, "exclude_modules": ["q_proj"]}),
    ("exclude_modules.*no module.*would be converted", {"exclude_modules": ["k_porj"]}),
    # A regular expression has to match the full name.
    ("exclude_modules.*no module.*would be converted", {"exclude_modules": "k_proj"}),
    (HOLDS_LAYERS, {"exclude_modules": r".*\.mlp"}),
    (HOLDS_LAYERS, {"exclude_modules": ["q_proj", "layers.0"]}),
    ("modules_to_not_convert names 'atention', which matches no module",
     {"modules_to_not_convert": ["atention"]}),
    ("rank_pattern has 'c_attn', which applies to no converted layer.*q_proj",
     {"rank_pattern": {"c_attn": 4}}),
    # Hidden behind an earlier one, or only of layers that stay as they are.
    ("has 'q_proj', which", {"scheme_pattern": {".*_proj": "nvidia", "q_proj": "nvidia"}}),
    ("has 'lm_head', which", {"scheme_pattern": {"lm_head": "nvidia"}}),
    ("'metsi' is not registered.*'metis'", {"scheme": "metsi"}),
    ("'nvdia' is not registered.*'nvidia'", {"scheme_pattern": {"q_proj": "nvdia"}}),
    ("model.layers.0.mlp is a LlamaMLP; only", {"target_modules": ["mlp"]}),
    # k_proj is 64 -> 32: half of 32 is the most.
    (r"rank=17 keeps 17 of 32 directions of .*k_proj; choose at most 16", {"rank": 17}),
    (r"rank=33 keeps 33 of 64 directions of .*down_proj; choose at most 32",
     {"rank_pattern": {"down_proj": 33}}),
    (r"rank_frac=0.75 keeps 48 of 64 directions of .*q_proj; choose at most 0.5",
     {"rank_frac": 0.75}),
    (r"rank_frac=0.9 keeps 58 of 64.*at most 0.5", {"rank_frac": 0.9, "split_weight": True}),
]  # fmt: skip


def refused(match: str, model: nn.Module, **options) -> None:
    """Nothing of the model changes."""
    modules = {name: id(module) for name, module in model.named_modules()}
    params = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
    with pytest.raises(ValueError, match=match):
        get_metis_model(model, MetisConfig(**options))
    assert {name: id(module) for name, module in model.named_modules()} == modules
    for name, param in model.named_parameters():
        identity, value = params.pop(name)
        assert id(param) == identity
        assert torch.equal(param.nan_to_num(7.0), value.nan_to_num(7.0))
    assert not params
    if config is not None:
        assert model.config.to_dict() == config
    assert not model._forward_pre_hooks


def test_options():
    model = build()
    for match, options in REFUSED:
        refused(match, model, **options)


def test_peft_is_laxer_or_says_it_too():
    with pytest.raises(ValueError, match="layers_to_transform"):
        peft.LoraConfig(target_modules=r".*q_proj", layers_to_transform=[0])
    options = {"target_modules": [Q_PROJ, "up_proj"], "layers_to_transform": [1]}
    assert Q_PROJ in chosen_by_peft(build(), **options)


@pytest.mark.parametrize(
    ("name", "target", "blocks"), [("llama", "q_proj", "layers"), ("gpt2", "c_attn", "h")]
)
def test_blocks_of_a_base_model(name, target, blocks):
    """PEFT finds none either, and all with `layers_pattern`."""
    options = {"target_modules": [target], "layers_to_transform": [1]}
    message = rf"{blocks}\.0\..*{target} is in no block.*Set layers_pattern='{blocks}' too"
    refused(message, build(name).base_model, **options)
    with pytest.raises(ValueError, match="not found in the base model"):
        chosen_by_peft(build(name).base_model, **options)
    options["layers_pattern"] = blocks
    expected = chosen_by_peft(build(name).base_model, **options)
    assert len(expected) == 1
    assert selected(build(name).base_model, **options) == expected


@pytest.mark.parametrize(
    ("names", "left"), [(["norm", "lm_head"], set()), (r".*(mlp|up_proj)", {"up_proj"})]
)
def test_exclusion_that_loses_nothing(names, left):
    """What it names stays anyhow, or is a layer beside what holds some."""
    fewer = selected(build()) - selected(build(), exclude_modules=names)
    assert {name.rsplit(".", 1)[1] for name in fewer} == left


class TestModels:
    def test_no_linear(self):
        refused("no nn.Linear", nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))

    def test_no_blocks(self):
        model = nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
        refused("keep_first_blocks=1, .*has no list of blocks", model, keep_first_blocks=1)

    def test_lookalike_as_target(self):
        model = build()
        for block in model.model.layers:
            block.mlp.up_proj = HouseLinear(64, 96)
        message = "up_proj is a HouseLinear; its class HouseLinear has a custom forward"
        refused(message, model, target_modules=["up_proj"])

    def test_tied_head_as_target_of_factors(self):
        targets = ["q_proj", "lm_head"]
        message = "lm_head shares its weight with model.embed_tokens"
        refused(message, build("llama-tied"), target_modules=targets, split_weight=True)
        config = MetisConfig(scheme="metis-paper", target_modules=targets)
        message += ".*'metis-paper'.*untie"
        refused(message, build("llama-tied"), scheme="metis-paper", target_modules=targets)
        get_metis_model(build(), config)  # not tied: split like every other layer
        config = config.replace(scheme_pattern={"lm_head": "nvfp4"})
        assert isinstance(get_metis_model(build("llama-tied"), config).lm_head, QuantLinear)

    def test_rank_of_an_expert_too_large(self):
        message = r"rank=40 keeps 40 of 64 directions of .*experts.down_proj; choose at most 32"
        refused(message, build("mixtral"), rank_pattern={"experts.down_proj": 40})

    def test_non_finite_weights(self):
        model = build("mixtral")
        model.model.layers[1].mlp.experts.down_proj.data[2, 0, 0] = float("inf")
        refused(r"layers.1.mlp.experts.down_proj: the weight has NaN or inf", model)
        model = build()
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        refused(r"layers.1.mlp.up_proj: the weight has NaN", model)

    def test_converted_twice(self):
        model = get_metis_model(build("mixtral"), MetisConfig(scheme="nvfp4"))
        with pytest.raises(ValueError, match=r"already converted.*'nvfp4'.*to_dense"):
            get_metis_model(model, MetisConfig())
        assert model.config.quantization_config.scheme == "nvfp4"

    def test_wrapped_by_ddp(self, tmp_path):
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
        )
        try:
            wrapped = nn.parallel.DistributedDataParallel(build())
            refused(r"already wrapped \(DistributedDataParallel\); convert .* before", wrapped)
        finally:
            dist.destroy_process_group()

    def test_wrapped_by_compile(self):
        compiled = torch.compile(build(), backend="eager")
        refused(r"the model is already wrapped \(OptimizedModule\)", compiled)
        model = build()
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
        refused(r"model.layers.1 is already wrapped \(OptimizedModule\)", model)

    def test_no_model_and_no_config(self):
        with pytest.raises(TypeError, match="a loaded model; got 'HuggingFaceTB/SmolLM2'"):
            get_metis_model("HuggingFaceTB/SmolLM2")
        with pytest.raises(TypeError, match="is not a MetisConfig; pass MetisConfig"):
            get_metis_model(llama(1), {"scheme": "metis"})
