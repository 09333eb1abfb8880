"""Tabulate the gap of each scheme by width and tokens per optimizer step, at equal tokens.

    python eval/studies/gap_by_batch.py

Reads the records of `metis-hf compare` in eval/results/batch-size, writes its table.md and the
table in docs/results.md. Nothing is trained.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from publish import RESULTS, ROOT, publish_table

from metis_hf.lab.compare.loss_table import format_gap
from metis_hf.lab.compare.statistics import Interval
from metis_hf.lab.show.table import markdown_table
from metis_hf.schemes import CONTROL

OUT = RESULTS / "batch-size"
PAGE = ROOT / "docs" / "results.md"
MARK = "gap by batch"


def tokens_of_step(record: dict[str, Any]) -> int:
    """Return the tokens of an optimizer step."""
    return record["plan"]["global_batch"] * record["plan"]["experiment"]["sequence_length"]


def width_of(record: dict[str, Any]) -> int:
    """Return the width of the model."""
    return record["plan"]["experiment"]["model"]["hidden_size"]


def table(records: list[dict[str, Any]]) -> str:
    """Return a row for each width and batch.

    Raises:
        ValueError: records of one width that differ in more than the batch.
    """
    records = sorted(records, key=lambda record: (width_of(record), tokens_of_step(record)))
    for _, group in itertools.groupby(records, width_of):
        of_width = list(group)
        plans = [record["plan"]["experiment"] for record in of_width]
        alike = [(plan["model"], plan["training"]["learning_rate"]) for plan in plans]
        tokens = [record["tokens"] for record in of_width]
        # Tokens may differ by part of a step, because only full steps are trained.
        differ = max(tokens) - min(tokens) > tokens_of_step(of_width[-1])
        if differ or any(each != alike[0] for each in alike):
            raise ValueError(f"{OUT}: the records differ in tokens, model or learning rate")
    names = [s["name"] for s in records[0]["summaries"] if s["name"] != CONTROL]
    rows = []
    for record in records:
        found = {summary["name"]: summary for summary in record["summaries"]}
        control, step = found[CONTROL], tokens_of_step(record)
        rows.append(
            [
                str(width_of(record)), f"{step:,}", f"{round(record['tokens'] / step):,}",
                str(len(control["losses"])), f"{control['mean']:.3f}",
                *(format_gap(Interval(**found[name]["gap"])) for name in names),
            ]
        )  # fmt: skip
    header = ["Width", "Tokens a step", "Steps", "Seeds", "Loss of bf16"]
    return markdown_table([*header, *(f"{name}: gap, %" for name in names)], rows)


def main() -> None:
    text = table([json.loads(path.read_text()) for path in sorted(OUT.glob("*.json"))])
    publish_table(OUT, MARK, text, PAGE)
    print(text)


if __name__ == "__main__":
    main()
