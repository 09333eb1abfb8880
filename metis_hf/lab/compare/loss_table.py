"""The results of a comparison as a table (terminal, markdown, LaTeX, CSV) and as sentences."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from metis_hf.lab.compare.statistics import Interval, Summary
from metis_hf.lab.show.table import (
    fitting,
    latex_table,
    latex_text,
    markdown_table,
    terminal_table,
)
from metis_hf.schemes import CONTROL

if TYPE_CHECKING:
    from rich.table import Table

_CROWDED = 8  # rows; more are sorted by loss
# Prefixes of column titles, most important first, for terminals; tasks rank before the last two.
_WORTH = (
    "Loss", "Gap to control", "Extra", "Above", "s/step", "Gap dense", "Avg", "x control", "MB",
)  # fmt: skip


def ordered(summaries: Sequence[Summary]) -> list[Summary]:
    """Return summaries as given; more than eight by loss, the control first, diverged ones last."""
    if len(summaries) <= _CROWDED:
        return list(summaries)
    return sorted(summaries, key=lambda s: (s.name != CONTROL, math.isnan(s.mean), s.mean))


def header(
    summaries: Sequence[Summary], reference: str | None = None, *, timed: bool = True
) -> list[str]:
    """Return the titles of the columns of summaries that were compared with `reference`.

    With `timed`, step times are shown, which are meaningless for runs that shared a machine.
    """
    return [title for title, _ in _columns(summaries, reference, timed)]


def rows(summaries: Sequence[Summary], *, timed: bool = True) -> list[list[str]]:
    """Return a row of plain cells for each variant; `timed` as in `header`."""
    columns = _columns(summaries, None, timed)
    return [[cell(summary) for _, cell in columns] for summary in summaries]


def _columns(
    summaries: Sequence[Summary], reference: str | None, timed: bool
) -> list[tuple[str, Callable[[Summary], str]]]:
    """Return (title, function from a summary to its cell) of each column that has numbers."""
    found: list[tuple[str, Callable[[Summary], str]]] = [
        ("Variant", lambda s: s.name),
        ("Loss", _loss),
        ("Gap to control, %", lambda s: format_gap(s.gap)),
    ]
    if any(s.gap_dense is not None for s in summaries):
        found.append(("Gap dense, %", lambda s: format_gap(s.gap_dense)))
    if any(s.above_reference is not None for s in summaries):
        found.append((f"Above {reference}, %", lambda s: format_gap(s.above_reference)))
    tasks = list(summaries[0].tasks)
    found += [(task, partial(_score, task)) for task in tasks]
    if tasks:
        found.append(("Avg", lambda s: "" if math.isnan(s.average) else f"{100 * s.average:.1f}"))
    if not all(math.isnan(s.extra) for s in summaries):
        found.append(("Extra multiply-adds, %", lambda s: f"{s.extra:.1f}"))
    if timed:
        control = [s.seconds_per_step for s in summaries if s.name == CONTROL]
        found += [
            ("s/step", lambda s: f"{s.seconds_per_step:.3f}"),
            ("x control", lambda s: f"{s.seconds_per_step / control[0]:.2f}" if control else ""),
        ]
    if any(s.peak_memory for s in summaries):
        found.append(("MB", lambda s: f"{s.peak_memory / 1e6:.0f}"))
    return found


def _loss(summary: Summary) -> str:
    deviation = "" if math.isnan(summary.deviation) else f" ± {summary.deviation:.4f}"
    return f"{summary.mean:.4f}{deviation}"


def _score(task: str, summary: Summary) -> str:
    value = summary.tasks[task]
    return f"{value:.4g}" if task in summary.not_shares else f"{100 * value:.1f}"


def format_gap(gap: Interval | None) -> str:
    """Return a difference with its interval: "+1.20 ± 0.30"; empty for the control."""
    if gap is None:
        return ""
    width = "" if math.isnan(gap.half_width) else f" ± {gap.half_width:.2f}"
    return f"{gap.mean:+.2f}{width}"


def best(summaries: Sequence[Summary]) -> str | None:
    """Return the name of the variant with the lowest mean loss; None if no mean is finite."""
    finite = [s for s in summaries if math.isfinite(s.mean)]
    return min(finite, key=lambda s: s.mean).name if finite else None


def markdown(
    summaries: Sequence[Summary], reference: str | None = None, *, timed: bool = True
) -> str:
    """Return the table in markdown, the lowest loss in bold."""
    cells = _with_bold(rows(summaries, timed=timed), summaries, "**{}**")
    return markdown_table(header(summaries, reference, timed=timed), cells)


def latex(summaries: Sequence[Summary], reference: str | None = None, *, timed: bool = True) -> str:
    """Return the table for LaTeX with booktabs, the lowest loss in bold."""
    cells = [[latex_text(cell) for cell in row] for row in rows(summaries, timed=timed)]
    titles = [latex_text(title) for title in header(summaries, reference, timed=timed)]
    return latex_table(titles, _with_bold(cells, summaries, "\\textbf{{{}}}"))


def _with_bold(cells: list[list[str]], summaries: Sequence[Summary], bold: str) -> list[list[str]]:
    """Return the rows with the loss of the best variant in bold."""
    for row, summary in zip(cells, summaries, strict=True):
        if summary.name == best(summaries):
            row[1] = bold.format(row[1])
    return cells


def terminal(
    summaries: Sequence[Summary], reference: str | None, *, timed: bool, width: int
) -> tuple[Table, list[str]]:
    """Return the table for a terminal, and the titles of the columns that do not fit.

    The lowest loss is bold, diverged variants are red.
    """
    titles = header(summaries, reference, timed=timed)
    titles = [title.removesuffix(" multiply-adds, %") for title in titles]
    cells = rows(summaries, timed=timed)

    def place(index: int) -> float:
        return next((n for n, word in enumerate(_WORTH) if titles[index].startswith(word)), 6.5)

    kept = fitting(titles, cells, width, sorted(range(1, len(titles)), key=place))
    winner = best(summaries)
    styles = [
        "red" if math.isnan(s.mean) else "bold" if s.name == winner != CONTROL else None
        for s in summaries
    ]
    table = terminal_table(
        [titles[index] for index in kept],
        [[row[index] for index in kept] for row in cells],
        title="Held-out loss, nats per token: mean ± sd; gap: mean ± 95 % interval",
        styles=styles,
    )
    return table, [title for index, title in enumerate(titles) if index not in kept]


def as_csv(summaries: Sequence[Summary]) -> str:
    """Return all numbers, unrounded, as CSV with one line per variant."""
    seeds = sorted({seed for summary in summaries for seed in summary.losses})
    tasks = list(summaries[0].tasks)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["variant", "mean_loss", "sd_loss", *(f"loss_seed_{seed}" for seed in seeds),
         "gap_percent", "gap_half_width_95",
         "gap_dense_percent", "gap_dense_half_width_95",
         "above_reference_percent", "above_reference_half_width_95",
         *tasks, "extra_multiply_adds_percent", "seconds_per_step", "peak_memory_bytes"]
    )  # fmt: skip
    for s in summaries:
        found = (s.gap, s.gap_dense, s.above_reference)
        gaps = (gap or Interval(math.nan, math.nan, 0) for gap in found)
        writer.writerow(
            [s.name, s.mean, s.deviation, *(s.losses.get(seed, "") for seed in seeds),
             *(number for gap in gaps for number in (gap.mean, gap.half_width)),
             *(s.tasks[task] for task in tasks),
             s.extra, s.seconds_per_step, s.peak_memory]
        )  # fmt: skip
    return out.getvalue()


def findings(summaries: Sequence[Summary], reference: str | None = None) -> list[str]:
    """Return the conclusions that the numbers allow, a sentence each."""
    sentences = []
    for s in summaries:
        if s.diverged:
            seeds = ", ".join(map(str, s.diverged))
            sentences.append(f"{s.name} diverged with seed {seeds}: its mean is not a number.")
    sentences += _told_apart({s.name: s.gap for s in summaries}, "the control")
    used = {frozenset(s.losses) for s in summaries}
    if len(used) > 1:
        sentences.append("Variants have different seeds; gaps use those they share.")
    elif all(len(seeds) == 1 for seeds in used):
        sentences.append("One seed: differences have no interval, and small ones mean nothing.")
    if reference is not None:
        sentences += _told_apart({s.name: s.above_reference for s in summaries}, reference)
    by_name = {s.name: s for s in summaries}
    if "bf16-split" in by_name and (gap := by_name["bf16-split"].gap) is not None:
        sentences.append(_split_sentence(gap))
    return sentences


def _told_apart(gaps: Mapping[str, Interval | None], base: str) -> list[str]:
    """Return sentences that list the variants above, below, and not told apart from `base`."""
    told: dict[str, list[str]] = {"above": [], "below": [], "not told apart from": []}
    for name, gap in gaps.items():
        if gap is not None and gap.count > 1 and math.isfinite(gap.mean):
            place = "above" if gap.mean > 0 else "below"
            told[place if gap.excludes_zero else "not told apart from"].append(name)
    return [
        f"{place.capitalize()} {base}, paired by seed: {', '.join(names)}."
        for place, names in told.items()
        if names
    ]


def _split_sentence(gap: Interval) -> str:
    if math.isnan(gap.half_width):
        found = f"changes the loss by {gap.mean:+.2f} %"
    elif gap.excludes_zero:
        found = f"by itself {'raises' if gap.mean > 0 else 'lowers'} the loss ({format_gap(gap)} %)"
    else:
        found = f"by itself makes no difference that can be told ({format_gap(gap)} %)"
    return (
        "Storing weights as u, s, vh and residual without quantizing anything (bf16-split) "
        f"{found}; a split scheme's gap contains that effect."
    )
