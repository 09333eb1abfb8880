"""The comparison as a table in the shape of the paper's Table 1: rows are schemes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from metis_hf.lab.compare.results import SchemeResult
from metis_hf.schemes import CONTROL

K = TypeVar("K")

TASK_TITLES = {"demo_cloze": "Cloze", "demo_choice": "Choice"}


def gaps_percent(losses: Mapping[K, float], base: Mapping[K, float]) -> dict[K, float]:
    """Return how far losses lie above others, in percent of these, for each key that both have.

    NaN where one of the two is not finite.
    """
    return {key: _above(loss, base[key]) for key, loss in losses.items() if key in base}


def _above(loss: float, base: float) -> float:
    return 100 * (loss / base - 1) if math.isfinite(loss) and math.isfinite(base) else math.nan


def gap_percent(result: SchemeResult, control: SchemeResult | None) -> float:
    """Return the held-out loss above the control's, in percent of it; NaN without a control."""
    return _above(result.loss, control.loss) if control is not None else math.nan


def average(result: SchemeResult) -> float:
    """Return the mean of the task values, in percent; NaN if one is."""
    values = [100 * task["value"] for task in result.tasks.values()]
    return sum(values) / len(values) if values else math.nan


def header(results: Sequence[SchemeResult]) -> list[str]:
    """Return the column titles."""
    tasks = [TASK_TITLES.get(task, task) for task in results[0].tasks]
    return ["Scheme", "Loss", f"Gap to {CONTROL}", *tasks, "Avg", "s/step"]


def rows(results: Sequence[SchemeResult], control_label: str = CONTROL) -> list[list[str]]:
    """Return one row of formatted cells per scheme.

    Args:
        results: in the order of the rows.
        control_label: how the control is shown, e.g. "bf16 (run in fp32)".
    """
    control = next((r for r in results if r.scheme == CONTROL), None)
    table = []
    for result in results:
        gap = gap_percent(result, control)
        table.append(
            [
                control_label if result.scheme == CONTROL else result.scheme,
                f"{result.loss:.4f}",
                "" if result is control else "?" if math.isnan(gap) else f"{gap:+.2f} %",
                *(f"{100 * task['value']:.1f}" for task in result.tasks.values()),
                f"{average(result):.1f}",
                f"{result.seconds_per_step:.2f}",
            ]
        )
    return table


def verdict(results: Sequence[SchemeResult], parameters: int, tokens: int) -> str:
    """Return one sentence: what the table shows, and what it does not."""
    control = next((r for r in results if r.scheme == CONTROL), None)
    others = [r for r in results if r.scheme != CONTROL and math.isfinite(r.loss)]
    limits = (
        f"one seed, {parameters / 1e6:.1f}M parameters and {tokens / 1e3:.0f}k tokens say that "
        "the pipeline works and which gaps are large, not how a real model would fare"
    )
    if control is None or not math.isfinite(control.loss) or not others:
        found = "no comparison without a finite control and another finite scheme"
    elif len(others) == 1:
        (best,) = others
        found = f"{best.scheme} ends {gap_percent(best, control):+.2f} % from the control"
    else:
        best, worst = (pick(others, key=lambda r: r.loss) for pick in (min, max))
        found = (
            f"of the schemes compared with {CONTROL}, {best.scheme} ends best "
            f"({gap_percent(best, control):+.2f} %) and {worst.scheme} worst "
            f"({gap_percent(worst, control):+.2f} %)"
        )
    errors = [t["stderr"] for r in results for t in r.tasks.values() if math.isfinite(t["stderr"])]
    diverged = [r.scheme for r in results if not math.isfinite(r.loss)]
    if diverged:
        found += f"; diverged: {', '.join(diverged)}"
    if errors:
        limits += f"; task scores have a standard error of about {100 * max(errors):.0f} points"
    return f"{found[0].upper()}{found[1:]}; {limits}."
