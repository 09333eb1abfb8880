"""Studies of eval/studies without a test file of their own."""

from __future__ import annotations

import importlib
import sys

import pytest
from paths import ROOT

from metis_hf.schemes import Role, build_scheme, registry

WIDTH = 128  # of the model that compensation.py trains: the smaller side of each of its layers
ALL = {Role.FPROP_INPUT, Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT}


@pytest.fixture
def study(monkeypatch):
    """Return studies by name; the schemes that they register are forgotten again."""
    monkeypatch.syspath_prepend(ROOT / "eval" / "studies")
    for name in ("compensation", "operand_study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(registry.registered())
    yield importlib.import_module
    registry.forget_since(before)


# title -> (rank of x, w and dy; None: not split; corrected; directions of a stored split weight)
COMPENSATION = {
    "published, rank 2 (metis-paper)": ((2, None, 2), set(), 2),
    "compensated, rank 2, stochastic everywhere": ((2, None, 2), set(), 2),
    "compensated, rank 16, nearest forward": ((16, None, 16), set(), 16),
    "the same, unit vectors": ((16, None, 16), set(), 16),
    "the same, weight dense and not split": (
        (16, None, 16),
        {Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT},
        None,
    ),
    "metis: weight dense and split, both corrected, rank 32": ((32, 32, 32), ALL, None),
    "metis, contraction mode": ((32, 32, 32), ALL, None),
}


def test_titles_of_compensation_say_what_its_schemes_are(study):
    compensation = study("compensation")
    for title, (ranks, corrected, stored) in COMPENSATION.items():
        scheme = build_scheme(compensation.VARIANTS[title], WIDTH, WIDTH)
        operands = (scheme.fprop_input, scheme.fprop_weight, scheme.dgrad_grad_output)
        found = [getattr(operand.conditioner, "rank", None) for operand in operands]
        assert tuple(found) == ranks, title
        assert scheme.corrected == corrected, title
        assert (scheme.weight.rank if scheme.weight.is_split else None) == stored, title
        stochastic = "stochastic" in title or "published" in title
        expected = "stochastic" if stochastic else "nearest"
        assert scheme.fprop_input.quantizer.rounding == expected, title


def test_an_interrupted_operand_study_keeps_the_other_variants_of_a_question(study):
    kept = {"rank": {"rank 1": 1, "rank 2": 2}, "input": {"direct": 3}}
    found = {"rank": {"rank 1": 4}, "weight": {"split": 5}}
    assert study("operand_study").merged(kept, found) == {
        "rank": {"rank 1": 4, "rank 2": 2},
        "input": {"direct": 3},
        "weight": {"split": 5},
    }
