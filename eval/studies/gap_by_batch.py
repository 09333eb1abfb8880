"""Gap of each scheme against the tokens of an optimizer step, at equal tokens: docs/results.md.

    python eval/studies/gap_by_batch.py

Reads the records of `metis-hf compare` in eval/results/batch-size, writes its table.md and the
table in docs/results.md. Nothing is trained.
"""

from __future__ import annotations

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


def table(records: list[dict[str, Any]]) -> str:
    """Return a row for each batch.

    Raises:
        ValueError: records that differ in more than the batch.
    """
    records = sorted(records, key=tokens_of_step)
    plans = [record["plan"]["experiment"] for record in records]
    alike = [(plan["model"], plan["training"]["learning_rate"]) for plan in plans]
    tokens = [record["tokens"] for record in records]
    # Whole steps alone are trained.
    differ = max(tokens) - min(tokens) > tokens_of_step(records[-1])
    if differ or any(each != alike[0] for each in alike):
        raise ValueError(f"{OUT}: records of other tokens, another model or learning rate")
    names = [s["name"] for s in records[0]["summaries"] if s["name"] != CONTROL]
    rows = []
    for record in records:
        found = {summary["name"]: summary for summary in record["summaries"]}
        control, step = found[CONTROL], tokens_of_step(record)
        rows.append(
            [
                f"{step:,}", f"{round(record['tokens'] / step):,}", str(len(control["losses"])),
                f"{control['mean']:.3f}",
                *(format_gap(Interval(**found[name]["gap"])) for name in names),
            ]
        )  # fmt: skip
    header = ["Tokens a step", "Steps", "Seeds", "Loss of bf16"]
    return markdown_table([*header, *(f"{name}: gap, %" for name in names)], rows)


def main() -> None:
    text = table([json.loads(path.read_text()) for path in sorted(OUT.glob("*.json"))])
    publish_table(OUT, MARK, text, PAGE)
    print(text)


if __name__ == "__main__":
    main()
