"""A comparison as text: for a terminal, in markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metis_hf.lab.evaluate.table import Comparison, Row, Score, digits
from metis_hf.lab.show.table import latex_text, markdown_table

FIRST = "Model, method"


def number(score: Score | None, column: str, *, sign: bool = False) -> str:
    """Return a value as it is shown; NaN and infinity carry a mark, a missing number is empty."""
    if score is None:
        return ""
    if not math.isfinite(score.value):
        return f"{'NaN' if math.isnan(score.value) else score.value} (!)"
    return f"{score.value:{'+' if sign else ''}.{score.decimals(column)}f}"


def error(score: Score | None, column: str) -> str:
    """Return its standard error, or nothing where that is unknown."""
    known = score is not None and math.isfinite(score.value) and math.isfinite(score.error)
    return f"±{score.error:.{digits(column)}f}" if score is not None and known else ""


def terminal(comparison: Comparison) -> Table:
    """Return a table for `Console.print`: errors below values, the best in bold, NaN in red."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(FIRST, max_width=34, overflow="fold")
    for column in comparison.columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    for block in comparison.blocks:
        if block.title:
            table.add_section()
            table.add_row(Text(block.title, style="italic"))
        for row in block.rows:
            cells = [_rich(comparison, block.kind, row, column) for column in comparison.columns]
            table.add_row(Text(row.name), *cells)
    return table


def print_terminal(comparison: Comparison, console: Console) -> None:
    """Print table and notes; off a terminal the table takes the width that it needs."""
    table = terminal(comparison)
    if not console.is_terminal:
        unlimited = console.options.update(max_width=1000)
        table.width = console.measure(table, options=unlimited).maximum
    console.print(table, crop=False, no_wrap=True, overflow="ignore")
    for note in comparison.notes:
        console.print(Text(note, style="dim"))


def markdown(comparison: Comparison) -> str:
    """Return one table a block; GitHub's dialect."""
    head = [FIRST, *comparison.columns]
    parts = []
    for block in comparison.blocks:
        lines = []
        for row in block.rows:
            cells = [_cell(comparison, block.kind, row, column) for column in comparison.columns]
            shown = [f"**{value}** {spread}" if best else f"{value} {spread}"
                     for value, spread, best in cells]  # fmt: skip
            lines.append([row.name.replace("|", r"\|"), *(cell.strip() for cell in shown)])
        heading = f"**{block.title}**\n\n" if block.title else ""
        parts.append(heading + markdown_table(head, lines))
    if comparison.notes:
        parts.append("".join(f"- {note}\n" for note in comparison.notes))
    return "\n".join(parts)


def latex(comparison: Comparison) -> str:
    """Return a `tabular` with booktabs rules; the notes are comments."""
    count = len(comparison.columns)
    lines = [f"% {note}" for note in comparison.notes]
    lines += [
        "% \\usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'c' * count}}}",
        r"\toprule",
        " & ".join(latex_text(title) for title in [FIRST, *comparison.columns]) + r" \\",
    ]
    for block in comparison.blocks:
        lines.append(r"\midrule")
        if block.title:
            lines.append(
                rf"\multicolumn{{{count + 1}}}{{l}}{{\textit{{{latex_text(block.title)}}}}} \\"
            )
        for row in block.rows:
            cells = []
            for column in comparison.columns:
                value, spread, best = _cell(comparison, block.kind, row, column)
                shown = rf"\textbf{{{latex_text(value)}}}" if best else latex_text(value)
                cells.append(shown + (rf" {{\tiny {latex_text(spread)}}}" if spread else ""))
            lines.append(" & ".join([latex_text(row.name), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def as_csv(comparison: Comparison) -> str:
    """Return one line a row, numbers unrounded, with columns for metric and standard error."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    head = ["kind", "name", "checkpoint", "scheme", "precision"]
    for column in comparison.columns:
        head += [column, f"{column} stderr", f"{column} metric"]
    writer.writerow(head)
    for block in comparison.blocks:
        for row in block.rows:
            line = [block.kind, row.name, row.label, row.scheme, row.precision]
            for column in comparison.columns:
                score = row.scores.get(column)
                line += ["", "", ""] if score is None else _numbers(score)
            writer.writerow(line)
    return stream.getvalue()


def _numbers(score: Score) -> list[str]:
    return [f"{score.value:.6g}", f"{score.error:.4g}", score.metric]


def _cell(comparison: Comparison, kind: str, row: Row, column: str) -> tuple[str, str, bool]:
    """Return (value, standard error, whether it is the best of the measured rows)."""
    score = row.scores.get(column)
    best = (
        kind == "measured"
        and score is not None
        and round(score.value, digits(column)) == comparison.best(column)
    )
    sign = kind.startswith("difference")
    return number(score, column, sign=sign), error(score, column), best


def _rich(comparison: Comparison, kind: str, row: Row, column: str) -> Text:
    value, spread, best = _cell(comparison, kind, row, column)
    style = "bold red" if "(!)" in value else "bold" if best else ""
    text = Text(value, style=style)
    return text.append(f"\n{spread}", style="dim") if spread else text
