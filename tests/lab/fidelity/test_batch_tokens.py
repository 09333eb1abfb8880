"""eval/studies/batch_tokens.py: what it measures, and that the page is the record."""

from __future__ import annotations

import json

import pytest
from paths import ROOT

from metis_hf import MetisConfig

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "eval" / "studies")
    import batch_tokens

    return batch_tokens


def test_only_splits_depend_on_the_batch(study, place, monkeypatch):
    monkeypatch.setattr(study, "SEQUENCES", 8)
    monkeypatch.setattr(study, "LENGTH", 24)
    monkeypatch.setattr(study, "BATCHES", ((1, 24), (8, 24), (1, 192)))
    split = {"rank": 1}  # at least 144 sums, or 36 rows
    configs = {
        "direct": [MetisConfig(scheme="nvfp4-rne")],
        "a": [MetisConfig(**split, seed=seed) for seed in (0, 1)],
        study.SAMPLED: [MetisConfig(**split)],
    }
    monkeypatch.setattr(study, "CONFIGS", configs)
    found = study.measure(str(place / "model"), place / "text.txt")
    few, many, long = "1 x 24", "8 x 24", "1 x 192"
    assert {name: list(by_batch) for name, by_batch in found.items()} == {
        name: [few, many, long] for name in configs
    }
    assert [len(found[name][many]["kl"]) for name in configs] == [1, 2, 1]
    direct = found["direct"][few]["kl"][0]
    # The tensor scale spans a batch: next to nothing here.
    assert direct == pytest.approx(found["direct"][many]["kl"][0], rel=0.2)
    one, other = found["a"][many]["kl"]
    sampled = found[study.SAMPLED]
    assert len({one, other, sampled[many]["kl"][0]}) == 3
    assert found["a"][few]["kl"][0] < one < direct
    assert other < direct
    assert sampled[few]["kl"][0] == found["a"][few]["kl"][0]  # all rows of so few
    rows = study.table(found).splitlines()
    assert rows[0] == "| Sequences x tokens | 1 x 24 | 8 x 24 | 1 x 192 |"
    mean = f"{(one + other) / 2:.3f} ({min(one, other):.3f} to {max(one, other):.3f})"
    assert rows[6].startswith("| a: KL (nats) |")
    assert rows[6].split(" | ")[2] == mean


def test_the_page_is_the_record(study):
    record = json.loads((study.OUT / "results.json").read_text())
    table = study.table(record["found"])
    assert f"<!-- {study.MARK} -->\n{table}<!-- end -->" in study.PAGE.read_text()
    assert (study.OUT / "table.md").read_text() == table
