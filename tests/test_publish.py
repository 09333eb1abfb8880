"""eval/publish.py: what goes into the repository, and what does not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted(
    table.parent.with_suffix(".json")
    for table in (ROOT / "eval/results").glob("*/table.md")
    if table.parent.with_suffix(".json").exists()
)


@pytest.fixture
def publish(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("publish", ROOT / "eval/publish.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "eval/results")
    (tmp_path / "README.md").write_text("a\n<!-- compare x -->\nold\n<!-- end -->\nb\n")
    return module


def test_a_comparison_goes_between_its_markers(publish, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("loss.png", "gap.png", "cost.png"):
        (run / name).write_bytes(b"png")
    (run / "table.md").write_text("| new |\n")
    plan = {"data": "/home/me/prose", "validation": None, "tasks_dir": None, "scale": "tiny"}
    (run / "compare.json").write_text(json.dumps({"plan": plan}))
    publish.publish_compare(run, "x")
    expected = "a\n<!-- compare x -->\n| new |\n<!-- end -->\nb\n"
    assert (tmp_path / "README.md").read_text() == expected
    record = json.loads((tmp_path / "eval/results/x.json").read_text())
    assert record["plan"] == plan | {"data": "prose"}
    publish.publish_compare(run, "y")  # one that README.md does not show
    assert (tmp_path / "README.md").read_text() == expected


def test_missing_markers_are_named(publish):
    with pytest.raises(ValueError, match="no '<!-- compare z -->'"):
        publish.readme_with("compare z", "table", "text")


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_committed_tables_are_their_records(path):
    """Every loss of the table is that of the runs, and no path of a machine is in the record."""
    record = json.loads(path.read_text())
    assert "/" not in f"{record['plan']['data']}{record['plan']['validation']}"
    table = (path.with_suffix("") / "table.md").read_text()
    for summary in record["summaries"]:
        losses = [r["loss"] for r in record["runs"] if r["scheme"] == summary["name"]]
        assert losses == list(summary["losses"].values())
        assert f"{sum(losses) / len(losses):.4f}" in table
    readme = (ROOT / "README.md").read_text()
    if f"<!-- compare {path.stem} -->" in readme:
        assert table in readme
