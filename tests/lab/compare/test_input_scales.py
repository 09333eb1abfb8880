"""eval/studies/input_scales.py: both searches, where a sample is everything and where it is not."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import VOCAB, llama

from metis_hf import MetisConfig, calibrate, get_metis_model, metis_layers
from metis_hf.training import scale_error

STUDY = "input_scales"


@pytest.fixture
def ids():
    return torch.randint(0, VOCAB, (6, 48), generator=torch.Generator().manual_seed(0))


def test_a_sample_of_everything_is_the_whole(study, ids):
    found = study.measure(llama(), ids, ids)
    assert found["layers"] == 14
    assert found["layers with another scale"] == 0
    assert found["loss above that with whole tensors' scales"] == 0


def test_scales_of_whole_tensors_come_of_all_blocks(study, ids, monkeypatch):
    model = llama()
    other = get_metis_model(copy.deepcopy(model), MetisConfig(scheme="w4a4"))
    whole = {name: scale.input_amax for name, scale in calibrate(other, ids.split(4)).items()}
    for name in ("LARGEST", "SPREAD"):
        monkeypatch.setattr(scale_error, name, 1)
    found = study.measure(model, ids, ids)
    assert 0 < found["layers with another scale"] < 14
    assert found["largest excess of the squared error, %"] > 0
    assert {name: one.get_buffer("input_amax").item() for name, one in metis_layers(model)} == whole
