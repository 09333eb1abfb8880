"""Put the paper's three tables next to our recorded runs, in report/beside-published.md.

    python eval/studies/beside_paper.py

Reads the published rows (metis_hf/lab/evaluate/paper_tables.json) and the records of
`metis-hf compare`. Nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from publish import RESULTS, ROOT, page_with

from metis_hf.lab.compare.loss_table import format_gap
from metis_hf.lab.compare.statistics import Interval
from metis_hf.lab.evaluate.paper import PAPER_TASKS, TITLES, paper_tables
from metis_hf.lab.show.table import markdown_table
from metis_hf.shared.numbers import short_number

PAGE = ROOT / "eval" / "results" / "report" / "beside-published.md"
TABLES = ("main", "ablation", "nvidia")
HEADER = (
    "Method", "What was run", "Loss", "To its BF16, %",
    *(TITLES[task] for task in PAPER_TASKS), "Avg", "Avg to its BF16",
)  # fmt: skip
PUBLISHED = "100B tokens"  # in every published run
CONTROL = "bf16"
# Published method -> our variants in a record; only these methods get rows.
METHODS = {
    "BF16": (CONTROL,),
    "FP4": ("nvfp4",),
    "FP4-Metis": ("metis-paper",),
    "FP4-Nvidia's Recipe": ("nvidia",),
}
DEFAULT = {"FP4-Metis": ("metis",)}  # has its own record, because `metis` changed
SWITCHED = ("nvidia, forward in bf16 from 80%", "nvidia, both in bf16 from 80%")
ABLATIONS = {
    "BF16": (CONTROL,),
    "Metis": ("metis-paper",),
    "w/o Weight Decomposition": ("metis-paper w/o weight split",),
    "w/o Activation Decomposition": ("metis-paper w/o activation split",),
    "w/o Gradient Decomposition": ("metis-paper w/o gradient split",),
    "w/o Sparse Random Sampling": ("metis-paper w/o sampling",),
}


@dataclass(frozen=True)
class Row:
    """One trained model: the paper's name for it, the run, the results.

    Attributes:
        method: the paper's name.
        run: variant, model, tokens.
        loss: held-out loss, as printed.
        gap: to the BF16 model of the same record, percent of its loss; empty for BF16 itself.
        scores: of the seven tasks in percent, then their average, as printed; blank if not run.
        average_gap: the average minus BF16's average, in points.
    """

    method: str
    run: str
    loss: str
    gap: str
    scores: Sequence[str] = ("",) * (len(PAPER_TASKS) + 1)
    average_gap: str = ""

    @property
    def cells(self) -> list[str]:
        """Return the row under `HEADER`."""
        return [self.method, self.run, self.loss, self.gap, *self.scores, self.average_gap]


def published(table: str) -> list[Row]:
    """Collect the published rows of one table, each compared with the BF16 model of its size."""
    paper = paper_tables()
    base = {row["model"]: row for row in paper["tables"]["main"]["rows"] if row["method"] == "BF16"}
    rows = paper["tables"][table]["rows"]
    if table == "ablation":  # this table has no BF16 row: take the one of the first table
        rows = [base[rows[0]["model"]], *rows]
    found = []
    for row in rows:
        control = base[row["model"]]
        is_control = row["method"] == "BF16"
        found.append(
            Row(
                row["method"],
                f"published: {paper['models'][row['model']]}, {PUBLISHED}",
                f"{row['loss']:.2f}",
                "" if is_control else f"{100 * (row['loss'] / control['loss'] - 1):+.1f}",
                [f"{score:.1f}" for score in (*row["scores"], row["average"])],
                "" if is_control else f"{row['average'] - control['average']:+.1f}",
            )
        )
    return found


def compared(record: dict[str, Any], names: dict[str, tuple[str, ...]]) -> list[Row]:
    """Collect rows of a record of `metis-hf compare`; names: published method -> variants.

    Raises:
        ValueError: the record lacks a variant.
    """
    summaries = {summary["name"]: summary for summary in record["summaries"]}
    rows = []
    for method, variants in names.items():
        for name in variants:
            if name not in summaries:
                raise ValueError(
                    f"the record has no variant {name!r}; it has {', '.join(summaries)}"
                )
            summary = summaries[name]
            gap, seeds = summary["gap"], len(summary["losses"])
            run = (
                f"ours: `{name}`, Llama {short_number(record['runs'][0]['parameters'])}, "
                f"{short_number(record['tokens'])} tokens, {seeds} seed{'s' * (seeds > 1)}"
            )
            gap_text = "" if gap is None else format_gap(Interval(**gap))
            rows.append(Row(method, run, f"{summary['mean']:.4f}", gap_text))
    return rows


def by_method(rows: Sequence[Row]) -> list[Row]:
    """Sort rows stably by method, in order of the methods' first appearance."""
    order = list(dict.fromkeys(row.method for row in rows))
    return sorted(rows, key=lambda row: order.index(row.method))


def tables() -> dict[str, str]:
    """Return the text between the markers for each of the paper's tables."""
    record = {
        name: json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("methods-tiny", "methods-tiny-metis", "methods-tiny-switch", "tiny-ablations")
    }
    main = {name: METHODS[name] for name in ("BF16", "FP4", "FP4-Metis")}
    nvidia = {name: METHODS[name] for name in ("BF16", "FP4-Metis", "FP4-Nvidia's Recipe")}
    switched = {"FP4-Nvidia's Recipe": SWITCHED}
    default = compared(record["methods-tiny-metis"], DEFAULT)
    ours = {
        "main": compared(record["methods-tiny"], main) + default,
        "ablation": compared(record["tiny-ablations"], ABLATIONS),
        "nvidia": compared(record["methods-tiny"], nvidia)
        + default
        + compared(record["methods-tiny-switch"], switched),
    }
    titles = {name: paper_tables()["tables"][name]["title"] for name in TABLES}
    found = {}
    for name in TABLES:
        rows = by_method([*published(name), *ours[name]])
        found[name] = f"**{titles[name]}**\n\n{markdown_table(HEADER, [r.cells for r in rows])}"
    return found


def with_tables(page: str) -> str:
    """Return the page with every table between its markers.

    Raises:
        ValueError: the page has no such marker.
    """
    for name, text in tables().items():
        page = page_with(f"paper {name}", text, page)
    return page


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
