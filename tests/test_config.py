"""MetisConfig: checked once, frozen, JSON both ways."""

import copy
import dataclasses
import json
import pickle
import re
import warnings

import pytest

from metis_hf import MetisConfig
from metis_hf.schemes import kept_directions, layer_rank
from metis_hf.shared.patterns import containing_pattern


def test_json_round_trip_keeps_every_field():
    config = MetisConfig(
        scheme="metis-paper",
        rank_frac=0.1,
        rank_multiple=4,
        gradient_rank_frac=0.5,
        decompose=["activation"],
        operand_mode="contraction",
        attention="nvidia",
        format="int4",
        backend="auto",
        outer_scale="token",
        subspace_interval=8,
        subspace_refinements=1,
        forward_rounding="nearest",
        target_modules=["q_proj", "v_proj"],
        exclude_modules="lm_head",
        keep_last_blocks=1,
        refresh_interval=7,
        seed=3,
    )
    assert MetisConfig.from_json(config.to_json()) == config
    unnamed = {"format", "attention", "outer_scale", "backend", "subspace_interval"}
    assert not unnamed & MetisConfig().to_dict().keys()
    written = json.loads(config.to_json())
    assert written["quant_method"] == "metis"
    assert {f.name for f in dataclasses.fields(config)} <= set(written)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MetisConfig().seed = 1


def test_the_callers_mapping_stays_the_callers():
    ranks, schemes = {"q_proj": 4}, {"down_proj": "bf16"}
    config = MetisConfig(rank_pattern=ranks, scheme_pattern=schemes)
    twin = copy.deepcopy(config)
    ranks["q_proj"], schemes["up_proj"] = 8, "nvfp4"
    assert config == twin
    assert (config.rank_pattern, config.scheme_pattern) == ({"q_proj": 4}, {"down_proj": "bf16"})
    copies = (config.replace(), pickle.loads(pickle.dumps(config)))
    assert all(each == config for each in (*copies, MetisConfig.from_json(config.to_json())))


def test_equal_configs_are_one_key():
    config = MetisConfig(rank_pattern={"q_proj": 4, "k_proj": 8}, target_modules=["q_proj"])
    other = MetisConfig(rank_pattern={"k_proj": 8, "q_proj": 4}, target_modules=["q_proj"])
    assert len({config, other, config.replace(seed=1), config.replace(rank_pattern={})}) == 3


def test_alternatives_of_modules_to_not_convert():
    """Each is bounded on both sides, as in a list of two."""
    for text in ("gate_proj|up_proj", "(?i)GATE_proj|up_PROJ", "gate_proj|(up_proj)"):
        matcher = containing_pattern(text)
        for name in ("gate_proj", "up_proj"):
            for inside in (name, f"mlp.{name}", f"mlp.{name}.inner"):
                assert matcher.match(inside), inside
            for other in (f"my_{name}", f"{name}2", f"mlp.{name}2.inner", f"mlp.my_{name}"):
                assert not matcher.match(other), other


FIELDS = [f.name for f in dataclasses.fields(MetisConfig)]


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


VALUES = [
    None, True, False, 0, 1, -1, 2**70, -(10**5000), 0.5, 1e-300, float("nan"), float("inf"), "",
    "x", "(((", "a" * 10**6, [], [[]], [["weight"]], [{}], [1], [None], [True], ["x", 1], ["((("],
    {"x", 1},
    ["x"] * 20_000, {}, {"x": 1}, {"x": "y"}, {"x": True}, {"x": 0}, {"x": []}, {"(((": 1},
    {1: 2}, {"x": 2**70}, nested(5000), object(),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:two_level")
def test_any_value_is_taken_or_refused_by_name():
    """Wrong types and sizes, as a broken or hostile config.json has them."""
    for name in (*FIELDS, "format_version", "quant_method"):
        check_any_value(name)


def check_any_value(name):
    results = [config_or_error(name, value) for value in VALUES]
    errors = [str(result) for result in results if isinstance(result, ValueError)]
    assert len(errors) > len(VALUES) / 2
    for error in errors:
        assert re.search(rf"\b{name}\b", error), error
        assert len(error) < 2_000
    for config in results:
        if isinstance(config, MetisConfig):
            assert MetisConfig.from_json(config.to_json()) == config


def config_or_error(name: str, value: object) -> MetisConfig | ValueError:
    """What a config with one value is, or why there is none."""
    try:
        return MetisConfig.from_dict({name: value})
    except ValueError as error:
        return error


def test_what_is_no_config():
    """An empty list is none either."""
    for values in (None, 3, "x", [], nested(5000), {1: 2}, {"x" * 10**6: 1}):
        with pytest.raises(ValueError, match="Metis config"):
            MetisConfig.from_dict(values)
    with pytest.raises(ValueError, match="Metis config"):
        MetisConfig.from_json("[" * 10**5)


REFUSED = [
    ({"rank_fraction": 0.1}, "in a Metis config; did you mean 'rank_frac'?"),
    ({"format_version": 99}, "this config has format_version 99, but the installed"),
    ({"quant_method": "gptq"}, "quant_method='gptq'; expected 'metis'"),
    ({"rank_frac": 1.5}, "rank_frac=1.5; expected a share"),
    ({"gradient_rank_frac": 1.01}, "gradient_rank_frac=1.01; expected None or a share"),
    ({"decompose": ("weights",)}, "decompose=('weights',); expected None or a list of any"),
    ({"operand_mode": "both"}, "operand_mode='both'; expected one of None, shared, contr"),
    ({"scale_rounding": "down"}, "scale_rounding='down'; expected one of"),
    ({"backend": "fp4"}, "backend='fp4'; expected one of emulated, native, auto"),
    ({"two_level": 1}, "two_level=1; expected one of True, False"),
    ({"keep_first_blocks": -1}, "keep_first_blocks=-1; expected an integer from 0"),
    ({"target_modules": [1]}, "target_modules=(1,); expected a string or a list of"),
    ({"n_iter": 10**9}, "n_iter=1000000000; expected an integer from 0 to 64"),
    ({"subspace_interval": 0}, "subspace_interval=0; expected an integer from 1 to"),
    ({"subspace_refinements": 2}, "subspace_refinements=2; expected 0, since subspace_interval=1"),
    ({"rank": 2**24 + 1}, "rank=16777217; expected None or an integer from 1 to"),
    ({"seed": 2**63}, "seed=9223372036854775808; expected"),
    ({"rank_pattern": {"q_proj": 2**25}}, "rank_pattern={'q_proj': 33554432}; expected"),
    ({"format_version": "9"}, "format_version='9'; expected an integer from 1"),
    ({"decompose": [["weight"]]}, r"decompose=(['weight'],); expected None or a list of"),
    ({"layers_pattern": "(a+)+"}, "layers_pattern='(a+)+'; expected None or the name"),
    ({"target_modules": "((("}, "target_modules='((('; expected a regular expression: missing"),
    ({"exclude_modules": "*"}, "exclude_modules='*'; expected a regular expression: nothing"),
    ({"modules_to_not_convert": ["x", "["]}, "modules_to_not_convert='['; expected a regular"),
    ({"rank_pattern": {"(": 4}}, "rank_pattern='('; expected a regular expression: missing )"),
    ({"scheme_pattern": {r"(a)\1": "bf16"}}, "RE2, which matches in linear"),
    (
        {"modules_to_not_convert": [f"(a+){n}" + "b" * 500 for n in range(20)]},
        "regular expressions have more than 10,000 characters in total",
    ),
]  # fmt: skip


def test_bounds_and_patterns_are_named():
    for values, message in REFUSED:
        with pytest.raises(ValueError, match=re.escape(message)):
            MetisConfig.from_dict(values)


def test_tiny_share_is_one_direction():
    """A share is rounded up, however small it is."""
    for share in (1e-9, 5e-324):
        assert kept_directions(MetisConfig(rank_frac=share), 64, 96) == 1
        assert layer_rank(MetisConfig(rank_frac=share, rank_multiple=1), 64, 96) == 1


def test_one_level_warns():
    """Block scales alone lose gradients whole; two levels are the silent default."""
    with pytest.warns(UserWarning, match=r"two_level=False.*gradients"):
        MetisConfig(two_level=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MetisConfig().two_level


def test_sets_have_one_order():
    """Theirs differs from process to process, and a resumed run compares configs."""
    names = {"v_proj", "q_proj", "down_proj", "up_proj", "o_proj"}
    assert MetisConfig(target_modules=names).target_modules == tuple(sorted(names))
    assert MetisConfig(target_modules=frozenset(names)).target_modules == tuple(sorted(names))
