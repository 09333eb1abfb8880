"""Conversion of a part of a model, whose owner's config does not know of it."""

from __future__ import annotations

import pytest
from conftest import llama
from torch import nn

from metis_hf import MetisConfig, get_metis_model, to_dense
from metis_hf.conversion import parts


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(parts.logger, "warning_once", lambda text, *args: found.append(text % args))
    return found


def test_saving_the_owner_warns(warnings, tmp_path):
    model = llama()
    get_metis_model(model.model, MetisConfig(scheme="nvfp4"))
    model.save_pretrained(tmp_path)
    assert len(warnings) == 1
    assert warnings[0].startswith("model was converted as a part of another model, whose config")


def test_nothing_else_warns(warnings, tmp_path):
    part = get_metis_model(llama().model, MetisConfig(scheme="nvfp4"))
    part.save_pretrained(tmp_path / "part")
    nn.ModuleDict({"module": part}).state_dict()  # DDP's name
    get_metis_model(llama(), MetisConfig(scheme="nvfp4")).save_pretrained(tmp_path / "whole")
    owner = llama()
    get_metis_model(owner.model, MetisConfig(scheme="nvfp4"))
    to_dense(owner)
    owner.save_pretrained(tmp_path / "dense")
    assert warnings == []
