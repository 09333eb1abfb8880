"""What tests of experiments share."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
from paths import ROOT

from metis_hf.schemes import registry


@pytest.fixture(scope="module")
def study(request):
    """The study of eval/studies that the test's module names as STUDY."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "eval" / "studies")
        yield importlib.import_module(request.module.STUDY)


@pytest.fixture
def records(study, tmp_path, monkeypatch):
    """Put records where the study reads them; returns the study."""

    def place(**named):
        for name, one in named.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(one))
        monkeypatch.setattr(study, "RESULTS", tmp_path)
        monkeypatch.setattr(study, "RECORDS", tuple(named))
        return study

    return place


@pytest.fixture
def eval_directory(monkeypatch):
    """Imports of one script by another, and schemes that a script registers, end with the test."""
    monkeypatch.setattr(registry, "SCHEMES", dict(registry.SCHEMES))
    monkeypatch.syspath_prepend(ROOT / "eval" / "studies")
    for study in ("paper_parts", "training_parts"):
        sys.modules.pop(study, None)  # so that it registers its schemes when imported again
    yield
    sys.modules.pop("training_parts", None)
