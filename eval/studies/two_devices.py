"""Tabulate gaps at width 768 on a CPU and on a GPU: eval/results/report/from-scratch.md.

    python eval/studies/two_devices.py

Reads the record of the CPU runs, and the losses that the GPU runs printed. Runs are paired by seed
and device. Nothing is trained.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from publish import RESULTS, ROOT, page_with

from metis_hf.lab.compare.loss_table import format_gap
from metis_hf.lab.compare.statistics import Interval, gaps_percent, t_interval

PAGE = ROOT / "eval" / "results" / "report" / "from-scratch.md"
CPU, GPU = RESULTS / "width-768.json", RESULTS / "width-768-gpu" / "losses.csv"
MARK = "two devices"
CONTROL, PLAIN = "bf16", "nvfp4-rne"

Losses = dict[str, dict[str, float]]  # variant -> seed -> held-out loss


def losses_of_record(path: Path) -> Losses:
    return {s["name"]: s["losses"] for s in json.loads(path.read_text())["summaries"]}


def losses_of_csv(path: Path) -> Losses:
    """Read a row for each variant, a column for each seed; an aborted run's cell is empty."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        row["variant"]: {
            name.removeprefix("seed "): float(value)
            for name, value in row.items()
            if name != "variant" and value
        }
        for row in rows
    }


def gaps(losses: Losses, name: str, base: str = CONTROL) -> list[float]:
    """Return the gaps to another variant in percent, for each seed that both have."""
    return list(gaps_percent(losses.get(name, {}), losses[base]).values())


def table(cpu: Losses, gpu: Losses) -> str:
    """Return a row for each variant that ran on the GPU, in order."""
    rows = [
        f"| Gap to the control, % | CPU | GPU | both | runs | above `{PLAIN}`, both | pairs |",
        "|---|" + "---:|" * 6,
    ]
    for name in gpu:
        if name != CONTROL:
            first, second = gaps(cpu, name), gaps(gpu, name)
            cells = [format_gap(_interval(f)) for f in (first, second, first + second)]
            pairs = [] if name == PLAIN else gaps(cpu, name, PLAIN) + gaps(gpu, name, PLAIN)
            cells += [str(len(first + second)), format_gap(_interval(pairs))]
            rows.append(f"| `{name}` | {' | '.join(cells)} | {len(pairs) or ''} |")
    return "\n".join(rows) + "\n"


def _interval(found: list[float]) -> Interval | None:
    return t_interval(found) if found else None


def main() -> None:
    text = table(losses_of_record(CPU), losses_of_csv(GPU))
    (GPU.parent / "table.md").write_text(text)
    PAGE.write_text(page_with(MARK, text, PAGE.read_text()))
    print(text)


if __name__ == "__main__":
    main()
