"""Fields that a scheme does not read: they are named, and truly change nothing."""

from __future__ import annotations

import logging

import pytest
import torch
from conftest import llama
from layers.layer_tools import FP4_SCHEMES, of_each_kind

from metis_hf import MetisConfig, get_metis_model, scheme_names
from metis_hf.schemes import build_scheme
from metis_hf.schemes.unread import unread_fields


def test_defaults_are_no_wish():
    for scheme in scheme_names():
        assert unread_fields(MetisConfig(scheme=scheme)) == []


@pytest.mark.parametrize(
    ("fields", "unread"),
    [
        ({"scheme": "metis", "rank_frac": 0.1, "n_iter": 3, "decompose": ["activation"]}, []),
        ({"scheme": "metis", "rank": 8, "rank_frac": 0.1}, ["rank_frac"]),
        ({"scheme": "metis", "decompose": [], "n_iter": 3}, ["n_iter"]),
        ({"scheme": "nvfp4", "decompose": ["weight"]}, ["decompose"]),
        ({"scheme": "nvfp4", "format": "int4", "forward_rounding": "nearest"}, []),
        ({"scheme": "bf16", "format": "int4"}, ["format"]),
        ({"scheme": "bf16", "format": "int4", "attention": "nvfp4-rne"}, []),
        ({"scheme": "bf16", "format": "int4", "scheme_pattern": {"q_proj": "nvfp4"}}, []),
        ({"scheme": "w4a4", "operand_mode": "contraction"}, ["operand_mode"]),
        ({"scheme": "mxfp4", "two_level": True}, []),
        ({"scheme": "bf16", "outer_scale": "token"}, ["outer_scale"]),
        ({"scheme": "nvidia", "outer_scale": "token"}, []),
        ({"scheme": "bf16", "attention": "mxfp4", "outer_scale": "token"}, ["outer_scale"]),
        (
            {"scheme": "bf16", "attention": "nvfp4-rne", "operand_mode": "shared"},
            ["operand_mode"],
        ),
        ({"scheme": "metis", "high_precision": ["forward", "backward"], "n_iter": 3}, []),
    ],
    ids=str,
)
def test_what_is_named(fields, unread):
    assert unread_fields(MetisConfig(**fields)) == unread


def said_at_conversion(caplog, **fields):
    with caplog.at_level(logging.WARNING):
        get_metis_model(llama(num_hidden_layers=1), MetisConfig(**fields))
    return [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]


def test_conversion_names_it(caplog):
    assert said_at_conversion(caplog, scheme="nvfp4", decompose=["weight"], sample_frac=0.5) == [
        "sample_frac=0.5, decompose=('weight',) has no effect: scheme nvfp4 does not use it"
    ]


def test_conversion_names_the_rank_that_stands_in_its_place(caplog):
    """The scheme reads a share where no rank is given."""
    fields = {"rank": 8, "rank_frac": 0.1, "decompose": [], "n_iter": 3}
    assert said_at_conversion(caplog, scheme="metis", **fields) == [
        "n_iter=3 has no effect: scheme metis does not use it",
        "rank_frac=0.1 has no effect: rank=8 overrides it",
    ]


@pytest.mark.parametrize("scheme", of_each_kind(FP4_SCHEMES))
def test_what_is_named_changes_no_number(scheme, token_ids):
    """All at once, of those that this scheme does not read."""
    wishes = {"sample_frac": 0.5, "n_iter": 3, "decompose": ["gradient"]}
    unread = unread_fields(MetisConfig(scheme=scheme, **wishes))
    # The authors' code samples no rows.
    assert unread in ([], list(wishes), ["sample_frac"] if scheme == "metis-released" else [])
    wishes = {name: wishes[name] for name in unread}

    def loss(**fields):
        torch.manual_seed(0)
        model = get_metis_model(llama(1), MetisConfig(scheme=scheme, **fields)).train()
        return model(input_ids=token_ids, labels=token_ids).loss

    assert torch.equal(loss(), loss(**wishes))


def test_scales_of_mxfp4_round_as_its_error_says_they_can():
    for rounding in ("floor", "up", "even"):
        layer = build_scheme(MetisConfig(scheme="mxfp4", scale_rounding=rounding), 64, 64)
        assert layer.fprop_input.quantizer.scale_rounding.value == rounding
    with pytest.raises(ValueError, match="choose 'floor' or 'up' or 'even'"):
        build_scheme(MetisConfig(scheme="mxfp4", scale_rounding="nearest"), 64, 64)
    with pytest.raises(ValueError, match="choose 'nearest' or 'up'"):
        build_scheme(MetisConfig(scheme="nvfp4", scale_rounding="floor"), 64, 64)
