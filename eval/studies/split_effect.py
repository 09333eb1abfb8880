"""Tabulate the effect of storing weights split on each scheme: report/tiny-model.md.

    python eval/studies/split_effect.py

Reads the records of `metis-hf compare` with all schemes and with preset `split`, on the same data
and schedule, and pairs their runs by seed. The columns are each scheme's gap to `bf16` with dense
weights, its gap to `bf16` and to `bf16-split` with u, s, vh and residual, and the change from dense
to split. Nothing is trained.
"""

from __future__ import annotations

import json
from typing import Any

from publish import RESULTS, ROOT, page_with

from metis_hf.lab.compare.loss_table import format_gap
from metis_hf.lab.compare.statistics import Interval, gaps_percent, t_interval

PAGE = ROOT / "eval" / "results" / "report" / "tiny-model.md"
DENSE, SPLIT = RESULTS / "methods-tiny.json", RESULTS / "methods-tiny-split.json"
MARK = "split effect"
TITLES = ("scheme", "dense", "split", "split, above `bf16-split`", "split, above dense", "seeds")
SUFFIX = ", split"
CONTROLS = ("bf16", "bf16-split")


def table(dense: dict[str, Any], split: dict[str, Any]) -> str:
    """Return a row for each scheme of the comparison with split weights, lowest loss first.

    Raises:
        ValueError: the comparisons did not train the same model on the same data.
    """
    plans = dense["plan"], split["plan"]
    if differing := [key for key, value in plans[0].items() if value != plans[1].get(key)]:
        raise ValueError(
            f"the comparisons differ in {', '.join(differing)}; train both with the same settings"
        )
    plain, stored = _losses(dense), _losses(split)
    for control in CONTROLS:
        stored.setdefault(control, plain[control])
    rows = []
    for name in sorted(stored.keys() - set(CONTROLS), key=lambda n: (_mean_gap(stored, n), n)):
        scheme = name.removesuffix(SUFFIX)
        # None if the scheme always stores split weights, or was not trained dense.
        own = plain.get(scheme) if name != scheme else None
        cells = [
            scheme,
            format_gap(own and _gap(own, plain["bf16"])),
            format_gap(_gap(stored[name], stored["bf16"])),
            format_gap(_gap(stored[name], stored["bf16-split"])),
            format_gap(own and _gap(stored[name], own)),
            str(len(stored[name])),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    head = [f"| {' | '.join(TITLES)} |", "|---|" + "---:|" * (len(TITLES) - 1)]
    return "\n".join([*head, *rows]) + "\n"


def _losses(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {summary["name"]: summary["losses"] for summary in record["summaries"]}


def _gap(losses: dict[str, float], base: dict[str, float]) -> Interval:
    """Return the gap in percent of `base`, paired by seed."""
    return t_interval(list(gaps_percent(losses, base).values()))


def _mean_gap(losses: dict[str, dict[str, float]], name: str) -> float:
    return _gap(losses[name], losses["bf16"]).mean


def main() -> None:
    records = [json.loads(path.read_text()) for path in (DENSE, SPLIT)]
    text = table(*records)
    PAGE.write_text(page_with(MARK, text, PAGE.read_text()))
    print(text)


if __name__ == "__main__":
    main()
