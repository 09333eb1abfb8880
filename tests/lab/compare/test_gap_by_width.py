"""eval/studies/gap_by_width.py: rows by hand, records that do not fit together, and the page."""

from __future__ import annotations

import math

import pytest

STUDY = "gap_by_width"


def record(width, rate=1e-3, tokens=1000, **gaps):
    """A record with the fields that are read; a variant's gap is (mean, half width, seeds)."""
    losses = dict.fromkeys("012", 4.0)
    summaries = [{"name": "bf16", "losses": losses, "mean": 4.0, "gap": None, "extra": 0.0}]
    for name, (mean, half, *count) in gaps.items():
        gap = {"mean": mean, "half_width": half, "count": count[0] if count else 3}
        summaries.append(
            {"name": name, "losses": {"0": 4.1}, "mean": 4.1, "gap": gap, "extra": 1.25}
        )
    experiment = {
        "model": {"hidden_size": width, "num_hidden_layers": 2}, "sequence_length": 8,
        "training": {"learning_rate": rate},
    }  # fmt: skip
    plan = {"experiment": experiment, "global_batch": 4}
    return {"plan": plan, "tokens": tokens, "summaries": summaries}


def test_rows_by_hand(records):
    study = records(
        b=record(64, a=(1.0, 0.5), c=(2.0, math.nan)),
        a=record(32, 2e-3, a=(3.0, math.nan), once=(9.0, 1.0)),
        again=record(64, c=(7.0, 1.0), d=(1.0, 1.0, 2)),
        third=record(128, c=(1.5, 1.0), d=(1.0, 1.0)),
    )
    widths = study.read()
    assert list(widths) == [32, 64, 128]
    gaps, brackets, costs = study.tables(widths).split("\n\n")
    assert brackets == study.OTHER_SEEDS
    assert gaps.splitlines()[0] == "| Gap to the control, % | Width 32 | Width 64 | Width 128 |"
    assert gaps.splitlines()[2:] == [
        "| loss of `bf16` | 4.0000 | 4.0000 | 4.0000 |",
        "| learning rate | 0.002 | 0.001 | 0.001 |",
        "| seeds | 3 | 3 | 3 |",
        "| `a` | +3.00 | +1.00 ± 0.50 |  |",
        "| `c` |  | +2.00 | +1.50 ± 1.00 |",
        "| `d` |  | +1.00 ± 1.00 (2) | +1.00 ± 1.00 |",
    ]
    assert costs.splitlines()[2:4] == ["| `a` | 1.2 | 1.2 |  |", "| `c` |  | 1.2 | 1.2 |"]


@pytest.mark.parametrize(
    ("other", "named"),
    [(record(64, tokens=999), "tokens"), (record(32, rate=5e-4), "learning_rate")],
)
def test_records_that_were_trained_otherwise(records, other, named):
    study = records(one=record(32), two=other)
    with pytest.raises(ValueError, match=f"two differs from another record in {named}"):
        study.read()


def test_the_page_is_the_records(study, tmp_path):
    widths = study.read()
    page = study.PAGE.read_text()
    assert f"<!-- {study.MARK} -->\n{study.tables(widths)}<!-- end -->" in page
    assert (study.OUT / "table.md").read_text() == study.tables(widths)
    study.draw(widths, tmp_path / "gap.png")
    assert (tmp_path / "gap.png").stat().st_size > 10_000
