"""A finished run, and copies of it."""

from __future__ import annotations

import shutil

import pytest

from lab.run_report.runs import train
from metis_hf.lab.run_report import page as report_page


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """(directory, trainer) of a finished run; tests that change files take a copy."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder)


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "copy")


@pytest.fixture
def no_heatmaps(monkeypatch):
    """For tests of what a page says: heat maps take most of its time."""
    monkeypatch.setattr(report_page, "heatmap", lambda run, panel: None)
