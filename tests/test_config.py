"""MetisConfig: checked once, frozen, JSON both ways."""

import dataclasses
import json
import warnings

import pytest

from metis_hf import MetisConfig


def test_json_round_trip_keeps_every_field():
    config = MetisConfig(
        scheme="metis-paper",
        rank_frac=0.1,
        rank_multiple=4,
        decompose=["activation"],
        operand_mode="contraction",
        format="int4",
        forward_rounding="nearest",
        target_modules=["q_proj", "v_proj"],
        exclude_modules="lm_head",
        keep_last_blocks=1,
        refresh_interval=7,
        seed=3,
    )
    assert MetisConfig.from_json(config.to_json()) == config
    written = json.loads(config.to_json())
    assert written["quant_method"] == "metis"
    assert {f.name for f in dataclasses.fields(config)} <= set(written)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MetisConfig().seed = 1


def test_unknown_key_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown key 'rank_fraction'.*'rank_frac'"):
        MetisConfig.from_dict({"rank_fraction": 0.1})


def test_newer_format_is_refused():
    with pytest.raises(ValueError, match=r"format_version 99.*upgrade"):
        MetisConfig.from_dict({"format_version": 99})


def test_foreign_method_is_refused():
    with pytest.raises(ValueError, match="quant_method='gptq'"):
        MetisConfig.from_dict({"quant_method": "gptq"})


@pytest.mark.parametrize(
    "bad",
    [
        {"rank_frac": 0.0},
        {"rank_frac": 1.5},
        {"rank_frac": "0.1"},
        {"sample_frac": -1},
        {"rank_multiple": 0},
        {"oversample": -1},
        {"n_iter": 1.5},
        {"decompose": ("weights",)},
        {"operand_mode": "both"},
        {"forward_rounding": "up"},
        {"scale_rounding": "down"},
        {"two_level": 1},
        {"target_modules": []},
        {"target_modules": [1]},
        {"exclude_modules": ""},
        {"keep_first_blocks": -1},
        {"refresh_interval": -5},
        {"seed": None},
        {"scheme": ""},
    ],
    ids=str,
)
def test_bad_value_is_named(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=rf"^{name}=.*expected"):
        MetisConfig(**bad)


def test_one_level_warns():
    """Block scales alone lose gradients whole; two levels are the silent default."""
    with pytest.warns(UserWarning, match=r"two_level=False.*gradients"):
        MetisConfig(two_level=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MetisConfig().two_level
