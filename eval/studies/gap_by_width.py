"""Tabulate and draw the gap of each scheme by model width: report/from-scratch.md.

    python eval/studies/gap_by_width.py

Reads the records of `metis-hf compare` at several widths, with the same text, steps and number of
tokens. If two records have a variant, the first one counts. Nothing is trained. Writes
eval/results/widths.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from gap_figure import plot_gaps
from publish import RESULTS, ROOT, publish_table

from metis_hf.lab.compare.loss_table import format_gap
from metis_hf.lab.compare.statistics import Interval
from metis_hf.lab.show.figure import figure_axes
from metis_hf.lab.show.table import markdown_table
from metis_hf.schemes import CONTROL

PAGE = ROOT / "eval" / "results" / "report" / "from-scratch.md"
RECORDS = (
    "width-96",
    "width-96-quarter",
    "width-96-directions",
    "width-192",
    "width-192-directions",
    "width-384-directions",
    "width-384-starts",
    "width-384-quarter",
    "width-768",
)
OUT = RESULTS / "widths"
MARK = "gap by width"
OTHER_SEEDS = (
    "In brackets: the number of seeds of a gap that has others than the row *seeds*; it is to the "
    "loss of BF16 over these."
)
ALIKE = ("tokens", "sequence_length", "global_batch", "layers")  # at every width


def read() -> dict[int, dict[str, Any]]:
    """Return width -> {"setup": ..., "variants": name -> summary} from the records.

    Raises:
        ValueError: the records were trained with different settings.
    """
    found: dict[int, dict[str, Any]] = {}
    for name in RECORDS:
        record = json.loads((RESULTS / f"{name}.json").read_text())
        experiment = record["plan"]["experiment"]
        model = experiment["model"]
        setup = {
            "tokens": record["tokens"], "sequence_length": experiment["sequence_length"],
            "global_batch": record["plan"]["global_batch"], "layers": model["num_hidden_layers"],
            "learning_rate": experiment["training"]["learning_rate"],
        }  # fmt: skip
        width = found.setdefault(model["hidden_size"], {"setup": setup, "variants": {}})
        for summary in record["summaries"]:
            width["variants"].setdefault(summary["name"], summary)
        first = next(iter(found.values()))["setup"]
        differing = [key for key in ALIKE if setup[key] != first[key]]
        if setup != width["setup"]:
            differing.append("learning_rate")
        if differing:
            raise ValueError(f"{name} differs from another record in {', '.join(differing)}")
    return dict(sorted(found.items()))


def variants(widths: dict[int, dict[str, Any]], least: int) -> list[str]:
    """Return the variants, without the control, that at least `least` widths have, in order."""
    names = Counter(name for width in widths.values() for name in width["variants"])
    return [name for name, count in names.items() if count >= least and name != CONTROL]


def gap_of(width: dict[str, Any], name: str) -> Interval | None:
    """Return the paired gap to the control, or None if the variant was not trained."""
    found = width["variants"].get(name)
    return found and Interval(**found["gap"])


def gap_cell(width: dict[str, Any], name: str) -> str:
    """Return a gap, with its number of seeds if the column's control has another number."""
    gap = gap_of(width, name)
    if gap is None or gap.count == len(width["variants"][CONTROL]["losses"]):
        return format_gap(gap)
    return f"{format_gap(gap)} ({gap.count})"


def tables(widths: dict[int, dict[str, Any]]) -> str:
    """Return two tables with a column for each width: gaps, and extra multiply-adds."""
    control = [width["variants"][CONTROL] for width in widths.values()]
    rates = [f"{width['setup']['learning_rate']:g}" for width in widths.values()]
    seeds = [str(len(one["losses"])) for one in control]
    gaps = [
        [f"loss of `{CONTROL}`", *(f"{one['mean']:.4f}" for one in control)],
        ["learning rate", *rates],
        ["seeds", *seeds],
    ]
    costs = []
    for name in variants(widths, least=2):
        gaps.append([f"`{name}`", *(gap_cell(w, name) for w in widths.values())])
        extra = [w["variants"].get(name, {}).get("extra") for w in widths.values()]
        costs.append([f"`{name}`", *("" if x is None else f"{x:.1f}" for x in extra)])
    header = [f"Width {width}" for width in widths]
    return (
        markdown_table(["Gap to the control, %", *header], gaps)
        + f"\n{OTHER_SEEDS}\n\n"
        + markdown_table(["Extra multiply-adds, %", *header], costs)
    )


def draw(widths: dict[int, dict[str, Any]], path: Path) -> None:
    """Draw gap against width with 95 % intervals, for variants at three or more widths."""
    figure, axes = figure_axes(1, 1, (9.5, 4.8))
    setup = next(iter(widths.values()))["setup"]
    figure.suptitle(f"Llamas of {setup['layers']} layers, {setup['tokens'] / 1e6:.1f}M tokens")
    axis = axes[0][0]
    found = {
        name: {w: gap for w, record in widths.items() if (gap := gap_of(record, name)) is not None}
        for name in variants(widths, least=3)
    }
    plot_gaps(axis, found, {width: str(width) for width in widths})
    axis.set_xlabel("width")
    axis.set_ylabel("held-out loss above bf16 (%)")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)


def main() -> None:
    widths = read()
    text = tables(widths)
    publish_table(OUT, MARK, text, PAGE)
    draw(widths, OUT / "gap.png")
    print(text)


if __name__ == "__main__":
    main()
