"""What tests of experiments share."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def placed_records(tmp_path, monkeypatch):
    """Put records where a study of eval/studies reads them; returns the study."""

    def place(study, named):
        for name, one in named.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(one))
        monkeypatch.setattr(study, "RESULTS", tmp_path)
        monkeypatch.setattr(study, "RECORDS", tuple(named))
        return study

    return place
