"""eval/studies/gap_by_batch.py: rows by hand, and records that do not fit together."""

from __future__ import annotations

import math

import pytest

STUDY = "gap_by_batch"


def record(batch, rate=1e-3, tokens=4096, width=32, **gaps):
    """A record with the fields that are read; a variant's gap is (mean, half width)."""
    summaries = [{"name": "bf16", "losses": {"0": 4.0, "1": 4.2}, "mean": 4.1, "gap": None}]
    for name, (mean, half) in gaps.items():
        summaries.append({"name": name, "gap": {"mean": mean, "half_width": half, "count": 2}})
    training = {"learning_rate": rate}
    experiment = {"model": {"hidden_size": width}, "sequence_length": 8, "training": training}
    plan = {"experiment": experiment, "global_batch": batch}
    return {"plan": plan, "tokens": tokens, "summaries": summaries}


def test_rows_by_hand(study):
    records = [
        record(64, rate=5e-4, tokens=1024, width=64, a=(0.5, 0.5), b=(1.5, 0.5)),
        record(128, a=(1.0, 0.5), b=(2.0, 0.25)),
        record(16, a=(3.0, 1.0), b=(4.0, math.nan)),
    ]
    assert study.table(records).splitlines() == [
        "| Width | Tokens a step | Steps | Seeds | Loss of bf16 | a: gap, % | b: gap, % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 32 | 128 | 32 | 2 | 4.100 | +3.00 ± 1.00 | +4.00 |",
        "| 32 | 1,024 | 4 | 2 | 4.100 | +1.00 ± 0.50 | +2.00 ± 0.25 |",
        "| 64 | 512 | 2 | 2 | 4.100 | +0.50 ± 0.50 | +1.50 ± 0.50 |",
    ]


@pytest.mark.parametrize("other", [record(32, tokens=999), record(32, rate=5e-4)])
def test_records_of_other_plans_are_refused(study, other):
    with pytest.raises(ValueError, match="the records differ in tokens, model or learning rate"):
        study.table([record(16), other])
