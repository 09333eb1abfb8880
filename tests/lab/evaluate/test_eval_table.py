"""The table: what is bold, what a difference and its error are, and the paper's own numbers."""

from __future__ import annotations

import csv
import io
import math
import re
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from rich.console import Console

from metis_hf import MetisConfig
from metis_hf.cli.evaluate import DEFAULT_TASKS
from metis_hf.lab.evaluate import formats, paper
from metis_hf.lab.evaluate import table as tables
from metis_hf.lab.evaluate.table import parse_metrics
from metis_hf.lab.evaluate.tasks import LOCAL_TASKS

TASKS = ["boolq", "hellaswag"]
SETTINGS = {"batch_size": 8, "task": "piqa", "limit": None, "conversion": None}


def record(label, *, loss=None, boolq="1100", hella="1000", norm="1110", **changes):
    """What `metis-hf eval` writes, as far as a table reads it."""

    def values(**digits):
        out = {"alias": "x"}
        for metric, text in digits.items():
            share = text.count("1") / len(text)
            error = math.sqrt(share * (1 - share) / (len(text) - 1))
            out |= {f"{metric},none": share, f"{metric}_stderr,none": error}
        return out

    metis = {
        "label": label, "scheme": label, "precision": "scheme", "held_out_loss": loss,
        "held_out_tokens": 1000, "nonfinite": {},
        "truncated_requests": 0, "truncated_tokens": 0, "settings": SETTINGS,
        "quantization_config": {"scheme": label},
    }  # fmt: skip
    items = {"boolq": {"acc": boolq}, "hellaswag": {"acc": hella, "acc_norm": norm}}
    return {
        "items": items,
        "results": {"boolq": values(acc=boolq), "hellaswag": values(acc=hella, acc_norm=norm)},
        "higher_is_better": {"boolq": {"acc": True}, "hellaswag": {"acc": True, "acc_norm": True}},
        "metis": {**metis, **changes},
    }


def compare(records, *arguments, **options):
    """Put rows of one result file each side by side."""
    return tables.compare([[one] for one in records], *arguments, **{"metrics": {}} | options)


def shown(comparison, block, name):
    (row,) = [row for row in comparison.blocks[block].rows if row.name == name]
    return {column: score.value for column, score in row.scores.items()}


def test_values_average_and_default_metrics():
    table = compare([record("bf16", loss=3.5)], TASKS)
    assert table.columns == ["Loss", "BoolQ", "HellaSwag", "Avg"]
    assert shown(table, 0, "bf16") == {"Loss": 3.5, "BoolQ": 50, "HellaSwag": 75, "Avg": 62.5}
    average = table.blocks[0].rows[0].scores["Avg"]
    errors = [100 * math.sqrt(p * (1 - p) / 3) for p in (0.5, 0.75)]
    assert average.error == pytest.approx(math.hypot(*errors) / 2)
    assert len(table.blocks) == 1  # nothing to compare with


def test_metric_choice():
    for option, hellaswag in (("acc", 25), ("acc_norm", 75), ("hellaswag=acc", 25)):
        table = compare([record("bf16")], TASKS, metrics=parse_metrics([option]))
        assert shown(table, 0, "bf16")["HellaSwag"] == hellaswag
        lacks = any("BoolQ does not have the requested metric acc_norm" in n for n in table.notes)
        assert lacks == (option == "acc_norm")
    with pytest.raises(ValueError, match="'boolq' has no metric 'acc_norm'; it has acc"):
        compare([record("bf16")], TASKS, metrics={"boolq": "acc_norm"})


def test_a_table_of_losses_alone_says_nothing_of_tasks():
    table = compare([record("bf16", loss=3.5), record("nvfp4", loss=3.6)], [])
    assert table.columns == ["Loss"]
    assert not any("task" in note or "Shown" in note for note in table.notes)


def test_differences_are_paired():
    control, other = record("bf16", loss=3.0), record("nvfp4", loss=3.25, boolq="0110")
    table = compare([control, other], TASKS)
    assert table.blocks[1].title == "Difference to bf16"
    (row,) = table.blocks[1].rows
    assert (row.scores["Loss"].value, row.scores["BoolQ"].value) == (0.25, 0)
    gaps = 100 * np.array([-1, 0, 1, 0])
    assert row.scores["BoolQ"].error == pytest.approx(gaps.std(ddof=1) / 2)
    assert row.scores["HellaSwag"].error == 0  # the same items right, in both
    other["items"] = {}  # not known which: as if independent
    (row,) = compare([control, other], TASKS).blocks[1].rows
    assert row.scores["BoolQ"].error == pytest.approx(100 * math.sqrt(2 * 0.25 / 3))


def test_control_is_bf16_unless_named():
    records = [record("nvfp4"), record("bf16"), record("metis")]
    assert compare(records, TASKS).blocks[1].title == "Difference to bf16"
    named = compare(records, TASKS, control="metis").blocks[1]
    assert [row.name for row in named.rows] == ["nvfp4", "bf16"]
    assert [block.kind for block in compare(records[::2], TASKS).blocks] == ["measured"]
    with pytest.raises(
        ValueError, match="control='fp8'; choose one of the rows: nvfp4, bf16, metis"
    ):
        compare(records, TASKS, control="fp8")


def test_best_is_bold_as_it_is_shown():
    table = compare([record("bf16", loss=3.00001), record("nvfp4", loss=3.0, boolq="1110"),
                     record("metis", loss=3.1)], TASKS)  # fmt: skip
    lines = formats.markdown(table).splitlines()
    assert lines[2].startswith("| bf16 | **3.0000** | 50.0 ±28.9 | 75.0 ±25.0 |")
    assert lines[3].startswith("| nvfp4 | **3.0000** | **75.0** ±25.0 | 75.0 ±25.0 |")
    assert "**" not in lines[4]
    assert r"\textbf{75.0} {\tiny $\pm$25.0}" in formats.latex(table)


def test_nan_is_flagged_and_makes_the_average_nan():
    broken = record("nvfp4", loss=math.nan, nonfinite={"boolq": 3, "held_out_loss": 1})
    broken["results"]["boolq"] = {"acc,none": math.nan, "acc_stderr,none": math.nan}
    table = compare([record("bf16", loss=3.0), broken], TASKS)
    assert math.isnan(shown(table, 0, "nvfp4")["Avg"])
    assert math.isnan(shown(table, 1, "nvfp4")["Avg"])
    notes = "\n".join(table.notes)
    assert "nvfp4: 3 likelihoods of BoolQ are NaN" in notes
    assert "nvfp4: the held-out loss is NaN" in notes
    for text in (formats.markdown(table), formats.latex(table)):
        assert text.count("NaN (!)") == 6  # loss, BoolQ, average; and their differences
    assert re.search(r"\*\*3\.0000\*\*", formats.markdown(table))  # the finite one is best


def test_published_rows_and_differences():
    config = {"scheme": "metis", "decompose": ["activation", "gradient"]}
    ablation = record("metis", loss=2.5, quantization_config=config)
    table = compare([record("bf16", loss=2.4), ablation], TASKS, published="llama3-8b")
    assert [row.method for row in table.blocks[2].rows] == ["BF16", "w/o Weight Decomposition"]
    difference = {row.name: row.scores for row in table.blocks[3].rows}
    assert difference["metis"]["Loss"].value == pytest.approx(2.5 - 2.47)
    assert difference["metis"]["BoolQ"].value == pytest.approx(50 - 58.5)
    assert difference["metis"]["BoolQ"].error == pytest.approx(100 * math.sqrt(0.25 / 3))
    lines = formats.markdown(table).splitlines()
    assert any(line.startswith("| BF16 (published) | 2.44 | 59.2 | 50.9 |") for line in lines)
    assert any(line.startswith("| metis | +0.03 | -8.5 ±28.9 |") for line in lines)
    assert any("not its numbers" in note for note in table.notes)
    match = "paper='gpt3'; choose a model of the paper: gpt2-130m, gpt2-1b1"
    with pytest.raises(ValueError, match=match):
        compare([record("bf16")], TASKS, published="gpt3")
    with pytest.raises(ValueError, match=r"any of the evaluated schemes \(bf16-split\)"):
        compare([record("bf16-split")], TASKS, published="gpt2-130m")


def test_published_method():
    for config, method in (
        ({}, None),
        ({"quant_method": "compressed-tensors"}, None),
        ({"scheme": "nvidia"}, "FP4-Nvidia's Recipe"),
        ({"scheme": "metis", "scheme_pattern": {"x": "bf16"}}, None),
        ({"scheme": "metis-paper", "decompose": ["weight", "activation", "gradient"]}, "FP4-Metis"),
        ({"scheme": "metis", "decompose": ["weight"]}, None),
        (MetisConfig(scheme="nvfp4").to_dict(), "FP4"),
        ({"scheme": "nvfp4", "format": "nvfp4"}, "FP4"),
        ({"scheme": "nvfp4", "format": "nf4"}, None),
        ({"scheme": "nvfp4", "outer_scale": "token"}, None),
        ({"scheme": "nvfp4", "high_precision": ["backward"]}, None),
        ({"scheme": "metis", "split_weight": True}, None),
        ({"scheme": "metis-paper", "operand_mode": "contraction"}, None),
        ({"scheme": "nvfp4", "forward_rounding": "nearest"}, None),
        ({"scheme": "nvfp4", "backward_rounding": "nearest"}, None),
        ({"scheme": "nvfp4", "scale_rounding": "nearest"}, None),
        ({"scheme": "nvfp4", "two_level": False}, None),
        ({"scheme": "metis", "keep_first_blocks": 1}, None),
        ({"scheme": "nvfp4", "keep_last_blocks": 2}, None),
        ({"scheme": "nvidia", "keep_last_blocks": 2}, "FP4-Nvidia's Recipe"),
        ({"scheme": "metis", "rank": 8, "sample_frac": 0.5}, "FP4-Metis"),
    ):
        assert paper.published_method(config) == method, config


def test_rows_have_names_of_their_own():
    """A scheme is named where no directory has exactly its name, and in every conversion."""

    def named(label, scheme, **settings):
        one = record(label, scheme=scheme, settings={**SETTINGS, **settings})
        return compare([one], TASKS).blocks[0].rows[0].name

    assert named("runs/nvfp4", "nvfp4") == "runs/nvfp4"
    assert named("export-nvfp4-rne", "nvfp4") == "export-nvfp4-rne nvfp4"
    assert named("export-nvfp4-rne", "nvfp4-rne") == "export-nvfp4-rne nvfp4-rne"
    assert named("nvfp4", "nvfp4", conversion={}) == "nvfp4 nvfp4"


def test_latex_is_well_formed():
    odd = record("a_b & 50 % {x} #1 \\ ~^", quantization_config={"scheme": "nvfp4"})
    table = compare([record("bf16", loss=3.0), odd], TASKS, published="gpt2-130m")
    text = formats.latex(table)
    code = [line for line in text.splitlines() if not line.startswith("%")]
    assert code[0] == r"\begin{tabular}{lcccc}"
    assert code[-1] == r"\end{tabular}"
    for line in code[1:-1]:
        plain = re.sub(r"\\[\\&%$#_{}]", "", line.removesuffix(r" \\"))
        assert plain.count("{") == plain.count("}")
        assert plain.count("$") % 2 == 0
        assert not re.search(r"[#%_^~±]", re.sub(r"\\text\w+", "", plain))
        if line.endswith(r"\\") and "multicolumn" not in line:
            assert plain.count("&") == len(table.columns)
    assert sum(line.startswith(r"\midrule") for line in code) == len(table.blocks)


def test_csv_has_every_number():
    table = compare([record("bf16", loss=3.0), record("nvfp4", loss=3.25)], TASKS)
    lines = list(csv.DictReader(io.StringIO(formats.as_csv(table))))
    assert [line["kind"] for line in lines] == ["measured"] * 2 + ["difference to control"]
    assert float(lines[0]["HellaSwag"]) == 75
    assert lines[0]["HellaSwag metric"] == "acc_norm"
    assert float(lines[0]["BoolQ stderr"]) == pytest.approx(28.87, abs=0.01)
    assert float(lines[2]["Loss"]) == 0.25


def test_terminal_keeps_columns_apart_in_a_pipe_and_shows_brackets():
    console = Console(width=40, file=io.StringIO())
    rows = [record("a [/8]", loss=3.0), record("b [rank 8]", loss=3.1)]
    formats.print_terminal(compare(rows, TASKS), console)
    shown = console.file.getvalue()
    head = ["Model,", "method", "Loss", "BoolQ", "HellaSwag", "Avg"]
    assert shown.splitlines()[1].split() == head
    assert all(row["metis"]["label"] in shown for row in rows)


def test_paper_tables_hold_together():
    tables = paper.paper_tables()
    assert tables["tasks"] == list(LOCAL_TASKS) == list(paper.PAPER_TASKS)
    assert ",".join(tables["tasks"]) == DEFAULT_TASKS
    rows = [row for table in tables["tables"].values() for row in table["rows"]]
    assert [len(t["rows"]) for t in tables["tables"].values()] == [9, 5, 6]
    differing = []
    for row in rows:
        mean = sum(Decimal(str(score)) for score in row["scores"]) / len(tables["tasks"])
        mean = mean.quantize(Decimal("0.1"), ROUND_HALF_UP)
        assert row.get("average_recomputed", row["average"]) == float(mean)
        if "average_recomputed" in row:
            assert row["average_recomputed"] != row["average"]
            differing.append(row["method"])
    assert differing == ["FP4", "w/o Gradient Decomposition", "FP4-Nvidia's Recipe"]
