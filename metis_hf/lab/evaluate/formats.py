"""A comparison as text: for a terminal, in markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metis_hf.lab.evaluate.table import Block, Comparison, Row, digits
from metis_hf.lab.show.table import latex_text, markdown_table

FIRST = "Model, method"


def print_terminal(comparison: Comparison, console: Console) -> None:
    """Print table and notes; outside a terminal the table is as wide as it needs."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(FIRST, max_width=34, overflow="fold")
    for column in comparison.columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    for block in comparison.blocks:
        if block.title:
            table.add_section()
            table.add_row(Text(block.title, style="italic"))
        for row in block.rows:
            cells = []
            for value, spread, best in _cells(comparison, block, row):
                style = "bold red" if "(!)" in value else "bold" if best else ""
                cells.append(Text(value, style=style))
                if spread:
                    cells[-1].append(f"\n{spread}", style="dim")
            table.add_row(Text(row.name), *cells)
    if not console.is_terminal:
        unlimited = console.options.update(max_width=1000)
        table.width = console.measure(table, options=unlimited).maximum
    console.print(table, crop=False, no_wrap=True, overflow="ignore")
    for note in comparison.notes:
        console.print(Text(note, style="dim"))


def markdown(comparison: Comparison) -> str:
    """Return one table per block in GitHub's markdown."""
    head = [FIRST, *comparison.columns]
    parts = []
    for block in comparison.blocks:
        lines = []
        for row in block.rows:
            cells = [row.name]
            for value, spread, best in _cells(comparison, block, row):
                shown = f"**{value}**" if best else value
                cells.append(f"{shown} {spread}".strip())
            lines.append(cells)
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
            title = rf"\textit{{{latex_text(block.title)}}}"
            lines.append(rf"\multicolumn{{{count + 1}}}{{l}}{{{title}}} \\")
        for row in block.rows:
            cells = [latex_text(row.name)]
            for value, spread, best in _cells(comparison, block, row):
                shown = rf"\textbf{{{latex_text(value)}}}" if best else latex_text(value)
                cells.append(shown + (rf" {{\tiny {latex_text(spread)}}}" if spread else ""))
            lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def as_csv(comparison: Comparison) -> str:
    """Return one CSV line per row, with value (six digits), standard error and metric."""
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
                if score is None:
                    line += ["", "", ""]
                else:
                    line += [f"{score.value:.6g}", f"{score.error:.4g}", score.metric]
            writer.writerow(line)
    return stream.getvalue()


def _cells(comparison: Comparison, block: Block, row: Row) -> Iterator[tuple[str, str, bool]]:
    """Yield (value, standard error, whether it is the best measured one) of each column.

    NaN and infinity are marked; a missing number and an unknown error are empty.
    """
    for column in comparison.columns:
        score = row.scores.get(column)
        if score is None:
            yield "", "", False
        elif not math.isfinite(score.value):
            yield f"{'NaN' if math.isnan(score.value) else score.value} (!)", "", False
        else:
            sign = "+" if block.kind.startswith("difference") else ""
            shown = digits(column)
            value = f"{score.value:{sign}.{shown if score.digits is None else score.digits}f}"
            spread = f"±{score.error:.{shown}f}" if math.isfinite(score.error) else ""
            best = round(score.value, shown) == comparison.best(column)
            yield value, spread, best and block.kind == "measured"
