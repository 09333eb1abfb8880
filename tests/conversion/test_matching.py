"""Which modules a config selects: PEFT's own selection for comparison, and everything refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from peft.tuners.tuners_utils import check_target_module_exists
from tensors import logits
from torch import nn

from conversion.architectures import EXPERTS, LAYERS
from conversion.selection_tools import (
    MLP_OF,
    SIZES,
    HouseLinear,
    build,
    chosen_by_peft,
    on_meta,
    selected,
    skipped,
)
from metis_hf import MetisConfig, MetisLinear, QuantLinear, get_metis_model, metis_layers
from metis_hf.conversion.matching import NameRules
from metis_hf.shared.patterns import matching_pattern


def test_hostile_patterns_end():
    """A config.json of somebody else's stops no loading, whichever field the pattern is in.

    `re` would be busy for longer than anyone waits, on the name of some module below.
    """
    pattern = "([a-z._]+)+[.]x"
    model = build()
    model.model.layers[0].mlp.abcdefghijklmnopqrstuvwxyzabcdefghijklmn = nn.Linear(4, 4)
    fine = f"{pattern}|.*q_proj"
    expected = {f"model.layers.{index}.self_attn.q_proj" for index in range(LAYERS)}
    assert selected(model, target_modules=fine) == expected
    assert selected(model, exclude_modules=fine) == selected(model) - expected
    for options in (
        {"target_modules": pattern},
        {"exclude_modules": pattern},
        {"modules_to_not_convert": [pattern]},
        {"rank_pattern": {pattern: 4}},
        {"scheme_pattern": {pattern: "bf16"}},
    ):
        (field,) = options
        with pytest.raises(ValueError, match=field):
            selected(model, **options)


def test_patterns_are_peft_s():
    """What PEFT's helpers say of every name; `modules_to_not_convert` groups alternatives too."""
    from peft.utils.other import get_pattern_key

    names = [name for name, _ in build("mixtral").named_modules()]
    keys = ["q_proj|k_proj", r"layers\.1\..*", r"\.0\.", "mlp.*", "v", "self_attn.v_proj", "^model"]
    for name in names:
        for key in keys:
            theirs = get_pattern_key([key], name)
            assert (matching_pattern({key: 1}, name) is not None) == (theirs == key and name != key)
            matcher = SimpleNamespace(target_modules=[], modules_to_save=[f"(?:{key})"])
            excluded = type(check_target_module_exists(matcher, name)).__name__
            rules = NameRules(MetisConfig(modules_to_not_convert=[key]))
            reason = rules.why_not(name)
            assert (reason == "in modules_to_not_convert") == (excluded == "_ExcludedModule")


FORMS = {
    "all": {"target_modules": "all-linear"},
    "suffixes": {"target_modules": ["q_proj", "down_proj"]},
    "full names": {"target_modules": [MLP_OF.format(0, "up_proj"), MLP_OF.format(1, "gate_proj")]},
    "suffix and full name": {"target_modules": ["q_proj", MLP_OF.format(1, "up_proj")]},
    "regex": {"target_modules": r".*\.(q|k)_proj"},
    "suffix excluded": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    "full name excluded": {
        "target_modules": ["q_proj"],
        "exclude_modules": ["model.layers.0.self_attn.q_proj"],
    },
    "regex excluded": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.0\..*"},
    "blocks": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "blocks of a list": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
    },
    "regex of alternatives": {"target_modules": r".*layers\.(\d+)\.(mlp|self_attn)\.(q|up)_proj$"},
    "head by name": {"target_modules": ["q_proj", "lm_head"]},
}


def test_selects_what_peft_selects():
    model = build()
    for form, options in FORMS.items():
        expected = chosen_by_peft(model, **options)
        assert expected, form
        assert selected(model, **options) == expected, form


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gpt-neox", "t5"])
def test_all_linear_is_peft_s_on_other_architectures(name):
    model = build(name)
    assert selected(model) == chosen_by_peft(model, target_modules="all-linear")


def test_where_all_linear_keeps_more_than_peft():
    """Gates of shared experts and classifiers, which PEFT takes; fused experts, which it leaves."""
    model = build("qwen2-moe")
    gates = {MLP_OF.format(index, "shared_expert_gate") for index in range(LAYERS)}
    fused = {
        MLP_OF.format(index, f"experts.{key}")
        for index in range(LAYERS)
        for key in ("gate_up_proj", "down_proj")
    }
    theirs = chosen_by_peft(model, target_modules="all-linear")
    assert selected(model) == theirs - gates | fused
    model = build("bert-classes")
    theirs = chosen_by_peft(model, target_modules="all-linear")
    assert selected(model) == theirs - {"classifier"}


@pytest.mark.parametrize("targets", ["all-linear", r".*"])
def test_heads_routers_and_tied_weights_stay_unless_named(targets):
    assert skipped(build(), target_modules=targets) == {"lm_head": "output head"}
    reason = "weight tied to model.embed_tokens"
    assert skipped(build("llama-tied"), target_modules=targets) == {"lm_head": reason}
    assert skipped(build("bert-classes"), target_modules=targets) == {"classifier": "output head"}
    gate = MLP_OF.format(0, "shared_expert_gate")
    assert skipped(build("qwen2-moe"), target_modules=targets)[gate] == "router"
    # Named in a list, they are converted.
    assert "lm_head" in selected(build(), target_modules=["lm_head"])
    assert "classifier" in selected(build("bert-classes"), target_modules=["classifier", "query"])
    assert gate in selected(build("qwen2-moe"), target_modules=["shared_expert_gate"])


@pytest.mark.parametrize(
    ("model", "options", "router"),
    [
        (
            "SwitchTransformersForConditionalGeneration",
            {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2,
             "num_sparse_encoder_layers": 1},
            "router.classifier",
        ),
        (
            "AfmoeForCausalLM",
            {**SIZES, "num_hidden_layers": 2, "intermediate_size": 96, "num_experts": 4,
             "num_dense_layers": 1},
            "mlp.router.gate",
        ),
    ],
)  # fmt: skip
def test_routers_inside_modules_of_their_own(model, options, router):
    """A router's linear layer may sit one module deeper, or beside experts that are not fused."""
    reasons = skipped(on_meta(model, vocab_size=64, **options))
    routers = [name for name, reason in reasons.items() if reason == "router"]
    assert routers
    assert all(name.endswith(router) for name in routers)


def test_blocks_kept_at_both_ends():
    options = {**SIZES, "num_hidden_layers": 6, "intermediate_size": 96, "vocab_size": 64}
    model = on_meta("LlamaForCausalLM", **options)
    names = selected(model, keep_first_blocks=1, keep_last_blocks=2)
    assert {name.split(".")[2] for name in names} == {"1", "2", "3"}
    reasons = skipped(model, keep_first_blocks=1, keep_last_blocks=2)
    found = [reasons[MLP_OF.format(index, "up_proj")] for index in (0, 4, 5)]
    assert found == ["keep_first_blocks=1", "keep_last_blocks=2", "keep_last_blocks=2"]


def test_experts_follow_every_option():
    """Fused expert weights are selected like modules of the same name."""
    model = build("mixtral")
    down = [MLP_OF.format(index, "experts.down_proj") for index in range(LAYERS)]
    assert selected(model, target_modules=["down_proj"]) == set(down)
    assert selected(model, target_modules=["down_proj"], layers_to_transform=[1]) == {down[1]}
    assert selected(model, target_modules=r".*experts\.down_proj") == set(down)
    assert selected(model, target_modules=["down_proj"], keep_first_blocks=1) == {down[1]}
    for options in (
        {"exclude_modules": ["experts.down_proj"]},
        {"exclude_modules": r".*\.down_proj"},
        {"modules_to_not_convert": ["experts.down_proj"]},
    ):
        assert selected(model) - selected(model, **options) == set(down)
    assert not any("experts" in name for name in selected(model, modules_to_not_convert=["mlp"]))


def test_reasons_for_what_no_option_selects():
    options = {"target_modules": ["q_proj"], "layers_to_transform": [0]}
    reasons = skipped(build(), **options)
    assert reasons["model.layers.1.self_attn.q_proj"] == "not in layers_to_transform"
    assert reasons["model.layers.0.self_attn.k_proj"] == "not a target"
    reasons = skipped(build(), exclude_modules=["k_proj"])
    assert reasons["model.layers.0.self_attn.k_proj"] == "excluded by exclude_modules"


def reload(model, directory):
    model.save_pretrained(directory)
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def test_rank_and_rank_pattern(tmp_path):
    """An absolute rank as it is; the first pattern that matches wins, also after loading."""
    patterns = {r"layers\.0\..*\.q_proj": 3, "q_proj": 5, "down_proj": 7}
    config = MetisConfig(rank=4, rank_pattern=patterns, split_weight=True)
    model = get_metis_model(build(), config)
    for each in (model, reload(model, tmp_path)):
        ranks = {name: layer.rank for name, layer in metis_layers(each)}
        for name, rank in ranks.items():
            expected = 7 if name.endswith("down_proj") else 4
            if name.endswith("q_proj"):
                expected = 3 if ".0." in name else 5
            assert rank == expected, name
            assert each.get_submodule(name).u.shape[1] == expected
        # Activations and gradients of a layer are split with its own rank too.
        scheme = each.model.layers[0].self_attn.q_proj.scheme
        assert scheme.fprop_input.conditioner.rank == 3
        assert each.config.quantization_config.rank_pattern == patterns
    assert "rank 3 (1 layers), 4 (10 layers), 5 (1 layers), 7 (2 layers)" in str(model.metis_report)


def test_scheme_pattern(tmp_path, token_ids):
    """Per-layer schemes compute as such, are reported, and survive saving and loading."""
    patterns = {r"layers\.1\.mlp\..*": "bf16", "q_proj": "nvidia"}
    config = MetisConfig(scheme="metis-paper", scheme_pattern=patterns)
    model = get_metis_model(build(), config)
    ids = token_ids % 128
    expected = {"bf16": QuantLinear, "nvidia": QuantLinear, "metis-paper": MetisLinear}
    for each in (model, reload(model, tmp_path)):
        for name, layer in metis_layers(each):
            scheme = "nvidia" if name.endswith("q_proj") else "metis-paper"
            if ".1.mlp." in name:
                scheme = "bf16"
            assert layer.config.scheme == scheme, name
            assert type(layer) is expected[scheme]
            assert layer.scheme.is_high_precision is (scheme == "bf16")
            assert layer.scheme.weight.is_split is (scheme == "metis-paper")
        assert torch.equal(logits(each, ids), logits(model, ids))
    text = str(model.metis_report)
    assert "scheme bf16 in 3 layers (scheme_pattern)" in text
    assert "scheme nvidia in 2 layers (scheme_pattern)" in text
    # The layer really runs its own scheme: on the same input it equals one converted that way.
    alone = get_metis_model(build(), MetisConfig(scheme="nvidia"))
    x = torch.randn(5, 64)
    mine, other = (m.model.layers[0].self_attn.q_proj.eval() for m in (model, alone))
    other.weight = mine.weight
    assert torch.equal(mine(x), other(x))


def test_experts_have_patterns_too():
    patterns = {"experts.down_proj": "bf16"}
    config = MetisConfig(
        scheme_pattern=patterns, rank_pattern={"gate_up_proj": 5}, split_weight=True
    )
    model = get_metis_model(build("mixtral"), config)
    experts = model.model.layers[0].mlp.experts
    assert all(layer.config.scheme == "bf16" for layer in experts.metis_down_proj)
    assert [layer.rank for layer in experts.metis_gate_up_proj] == [5] * EXPERTS


def test_models_built_from_one_config(tmp_path):
    """transformers shares the config object; only the converted model may say that it is."""
    config = build("mixtral").config
    plain, model = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
    assert plain.config is model.config
    get_metis_model(model, MetisConfig())
    assert not hasattr(plain.config, "quantization_config")
    assert model.model.config is model.config  # still one for the whole model
    assert plain.config._experts_implementation == config._experts_implementation != "metis"
    plain.save_pretrained(tmp_path)
    assert not list(metis_layers(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)))


def test_meta_device(tmp_path, token_ids):
    """A model without memory converts to layers without memory; loading fills them."""
    with torch.device("meta"):
        model = build()
    get_metis_model(model, MetisConfig())
    assert all(param.is_meta for param in model.parameters())
    real = get_metis_model(build(), MetisConfig())
    shapes = {name: param.shape for name, param in real.named_parameters()}
    assert {name: param.shape for name, param in model.named_parameters()} == shapes
    assert model.metis_report.skipped == real.metis_report.skipped
    assert model.metis_report.bits_per_weight == real.metis_report.bits_per_weight
    model.load_state_dict(real.state_dict(), assign=True)
    real.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(param.is_meta for param in loaded.parameters())
    expected = logits(real, token_ids % 128)
    assert torch.equal(logits(loaded, token_ids % 128), expected)


class HouseExperts(nn.Module):
    """Experts outside transformers' interface."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 64))


def test_lookalikes_are_reported():
    model = build()
    mlp = model.model.layers[0].mlp
    mlp.up_proj = HouseLinear(64, 96, bias=False)
    mlp.extra = HouseExperts()
    mlp.positions = nn.Module()
    mlp.positions.table = nn.Parameter(torch.zeros(1, 9, 64))  # one matrix: no experts
    get_metis_model(model, MetisConfig())
    reasons = model.metis_report.skipped
    reason = "its class HouseLinear has a custom forward pass"
    assert reasons["model.layers.0.mlp.up_proj"] == reason
    assert reasons["model.layers.0.mlp.extra.weight"] == (
        "3-D parameter of HouseExperts, unknown to transformers' experts interface"
    )
    assert type(model.model.layers[0].mlp.up_proj) is HouseLinear
    assert set(reasons) == {
        "lm_head",
        MLP_OF.format(0, "up_proj"),
        MLP_OF.format(0, "extra.weight"),
    }
    assert "HouseLinear" in str(model.metis_report)
