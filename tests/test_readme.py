"""The README's code runs, its table is the committed result, its scheme table is the registry."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import get_type_hints

import pytest
from paths import ROOT

from metis_hf import scheme_names
from metis_hf.cli import app
from metis_hf.experiments import demo

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/quickstart/model/config.json").exists()
    assert "layers converted" in done.stdout


def test_table_is_the_committed_result():
    table = (ROOT / "eval/results/demo/table.md").read_text()
    assert table in README
    record = json.loads((ROOT / "eval/results/demo/results.json").read_text())
    for result in record["results"]:
        assert f"| {result['loss']:.4f} |" in table
    assert record["verdict"] in table


def test_scheme_table_is_the_registry():
    section = README[README.index("## Schemes") : README.index("## Spectral health")]
    assert set(re.findall(r"^\| `([\w-]+)`", section, re.MULTILINE)) == set(scheme_names())


def test_the_demo_takes_what_its_help_says():
    """One sentence about its time, in README.md and in `metis-hf demo --help`."""
    text = " ".join(README.split())
    assert demo.FULL_TIME in text
    assert demo.QUICK_TIME in text
    (command,) = (c for c in app.registered_commands if c.callback.__name__ == "demo")
    assert demo.FULL_TIME in command.help
    assert (
        demo.QUICK_TIME
        in get_type_hints(command.callback, include_extras=True)["quick"].__metadata__[0].help
    )


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_named_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
