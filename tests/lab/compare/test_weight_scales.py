"""eval/studies/weight_scales.py: clipping by rows, and a model that gets its weights back."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import llama
from tensors import assert_same

from metis_hf.numerics import Quantizer

STUDY = "weight_scales"


def test_each_row_has_its_own_best_share(study):
    """The slow way: every row by itself, every share."""
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) ** 3
    quantizer = Quantizer()
    found = study.best_clipped(weight, quantizer)
    chosen = set()
    for row in range(len(weight)):
        candidates = []
        for share in study.SHARES:
            limit = share * weight.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True)
            clipped = weight.unflatten(1, (-1, 16)).clamp(-limit, limit).flatten(1)
            candidates.append(quantizer(clipped)[row])
        errors = [(values - weight[row]).square().sum().item() for values in candidates]
        best = errors.index(min(errors))
        assert torch.equal(found[row], candidates[best])
        chosen.add(best)
    assert len(chosen) > 1


def test_rows_by_hand(study):
    model = llama(1).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(0, 64, (8, 16))
    rows = study.measure(model, ids)
    assert [row["scales"] for row in rows] == list(study.WAYS)
    assert_same(model, before)
    exact = study.losses(model, ids)
    weights = [model.get_parameter(n) for n in before if "proj" in n]
    noise = sum((Quantizer()(w.detach()) - w).square().sum().item() for w in weights)
    signal = sum(w.square().sum().item() for w in weights)
    assert rows[0]["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise))
    with torch.no_grad():
        for weight in weights:
            weight.copy_(Quantizer()(weight))
    rises = [100 * (now / was - 1) for now, was in zip(study.losses(model, ids), exact)]
    assert rows[0]["rise_percent"] == pytest.approx(sum(rises) / 2, abs=0.01)
