"""The README is short, its code runs, its numbers are committed results."""

from __future__ import annotations

import json
import re

import pytest
from forked import python
from paths import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MOST_WORDS = 1100

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
    assert len(README.split()) <= MOST_WORDS


def test_the_first_screen_has_four_commands():
    block = README[: README.index("## ")].split("```bash\n")[1].split("```")[0]
    assert len(block.strip().splitlines()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path):
    assert "layers converted" in python("-c", GIVEN + block + THEN, cwd=tmp_path)


def test_the_demo_table_is_the_committed_result():
    table = (ROOT / "eval/results/demo/table.md").read_text()
    assert table in (ROOT / "docs/quickstart.md").read_text()
    record = json.loads((ROOT / "eval/results/demo.json").read_text())
    for summary in record["summaries"]:
        assert f"{summary['losses']['0']:.4f}" in table


def column(record, title):
    """Return the cells of one column of a record's table, by scheme."""
    lines = (ROOT / "eval/results" / record / "table.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    at = rows[0].index(title)
    return {row[0]: row[at] for row in rows}


def test_the_table_of_schemes_is_the_records():
    """Each cell is the committed table's: from scratch, trained further, untrained."""
    gap = "Gap to control, %"
    scratch = column("scale-30m", gap)
    further = column("real-model/continued-301k", gap)
    untrained = column("real-model/prose", "Loss rise %")
    shown = re.findall(r"^\| `([\w-]+)` \| [^|]+ \|(.*)\|(.*)\|(.*)\|$", README, re.MULTILINE)
    assert len(shown) == 5
    for scheme, *cells in shown:
        wanted = [values.get(scheme, "") for values in (scratch, further, untrained)]
        assert [cell.strip() for cell in cells] == wanted, scheme


def test_named_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
