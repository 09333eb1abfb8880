"""The README is short, its code runs, its numbers are committed results."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from paths import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MOST_WORDS = 1350  # without the bars of tables

# What the reader of the README's code has already: a model, a data set, arguments.
GIVEN = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
))
dataset = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 16))]
args = TrainingArguments("run", max_steps=2, use_cpu=True, save_strategy="no", report_to="none")
"""
THEN = """
trainer.train()
trainer.save_model("run/model")
again = type(model).from_pretrained("run/model")
x = torch.arange(16)[None]
assert torch.equal(model.eval()(x).logits, again.eval()(x).logits)
"""


def test_is_short():
    words = [word for word in re.findall(r"[^\s|]+", README) if word.strip("-:")]
    assert len(words) <= MOST_WORDS


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path):
    code = GIVEN + block + THEN
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "layers converted" in done.stdout


def test_table_is_the_committed_result():
    assert (ROOT / "eval/results/real-model/prose/table.md").read_text() in README
    table = (ROOT / "eval/results/demo/table.md").read_text()
    assert table in (ROOT / "docs/quickstart.md").read_text()
    record = json.loads((ROOT / "eval/results/demo/results.json").read_text())
    for result in record["results"]:
        assert f"| {result['loss']:.4f} |" in table
    assert record["verdict"] in table


def test_gaps_are_those_of_the_comparison():
    """Every `+a ± b` of the README is a cell of the committed table, in the row it is said of."""
    rows = {}
    for record in ("methods-tiny", "methods-tiny-metis"):  # later ones count
        for line in (ROOT / f"eval/results/{record}/table.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0]] = cells[2:3]
    shown = re.findall(r"^\| `([\w-]+)` \|.*\| (.*?) \|$", README, re.MULTILINE)
    gaps = {name: gap for name, gap in shown if "±" in gap}
    assert len(gaps) >= 4
    for name, gap in gaps.items():
        assert rows[name] == [gap], name
    others = re.sub(r"<!-- fidelity .*?<!-- end -->", "", README, flags=re.DOTALL)
    prose = re.sub(r"^\|.*$", "", others, flags=re.MULTILINE)
    said = re.findall(r"with (\d+ %) of them[^.]* the gap is\s+(\+\S+ ± \S+) %", prose)
    assert len(said) == len(re.findall("±", prose))
    for directions, gap in said:
        (row,) = (name for name in rows if name.startswith(f"metis {directions}"))
        assert rows[row] == [gap]


def test_named_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
