"""eval/studies/batch_tokens.py: what it measures, and that the page is the record."""

from __future__ import annotations

import json

import pytest
from paths import ROOT

from metis_hf import MetisConfig


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "eval" / "studies")
    import batch_tokens

    return batch_tokens


def test_only_splits_depend_on_the_batch(study, place, monkeypatch):
    monkeypatch.setattr(study, "SEQUENCES", 4)
    monkeypatch.setattr(study, "LENGTH", 24)
    monkeypatch.setattr(study, "BATCHES", (1, 4))
    split = MetisConfig(rank=4)
    monkeypatch.setattr(study, "CONFIGS", {"direct": MetisConfig(scheme="nvfp4-rne"), "a": split})
    found = study.measure(str(place / "model"), place / "text.txt")
    assert {name: list(by_tokens) for name, by_tokens in found.items()} == {
        "direct": ["24", "96"], "a": ["24", "96"]
    }  # fmt: skip
    few, many = (found["a"][tokens]["kl"] for tokens in ("24", "96"))
    assert few < many < found["direct"]["24"]["kl"]
    # The tensor scale is that of a batch: next to nothing here.
    assert found["direct"]["24"]["kl"] == pytest.approx(found["direct"]["96"]["kl"], rel=0.2)
    rows = study.table(found).splitlines()
    assert rows[0] == "| Tokens of a batch | 24 | 96 |"
    assert rows[5] == f"| a: KL (nats) | {few:.4f} | {many:.4f} |"


def test_the_page_is_the_record(study):
    record = json.loads((study.OUT / "results.json").read_text())
    table = study.table(record["found"])
    assert f"<!-- {study.MARK} -->\n{table}<!-- end -->" in study.PAGE.read_text()
    assert (study.OUT / "table.md").read_text() == table
