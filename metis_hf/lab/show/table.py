"""One table, a header and rows of cells as text, in markdown, for LaTeX, and for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

Cells = Sequence[str]
_NAME = 30  # characters of a name that is not wrapped in a terminal
_LATEX = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "<": r"$<$",
        ">": r"$>$",
    }
)


def markdown_table(header: Cells, rows: Sequence[Cells]) -> str:
    """Return a table in GitHub's dialect; all columns but the first are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    lines = [[_markdown_cell(cell) for cell in cells] for cells in (header, rule, *rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _markdown_cell(text: str) -> str:
    """Return a text that stays in its cell, such as the name of a file."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.splitlines()))


def latex_table(header: Cells, rows: Sequence[Cells]) -> str:
    """Return a `tabular` with booktabs rules; cells are LaTeX already (`latex_text`)."""
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", "\\toprule"]
    lines += [" & ".join(header) + " \\\\", "\\midrule"]
    lines += [" & ".join(cells) + " \\\\" for cells in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def latex_text(text: str) -> str:
    """Return text with LaTeX's characters escaped; a hyphen before a number is a minus sign."""
    return re.sub(r"^-(?=\d)", "$-$", text.translate(_LATEX))


def fitting(header: Cells, rows: Sequence[Cells], width: int, worth: Sequence[int]) -> list[int]:
    """Return the columns, in their order, of which `terminal_table` breaks no cell.

    Args:
        header: titles of the columns; their words stay whole.
        rows: cells of each row.
        width: of the terminal.
        worth: columns besides the first, which is there in any case; those that no longer fit
            beside the ones before them are left out.
    """
    wide = [
        max(map(len, (*title.split(), *(row[index] for row in rows))), default=0) + 3
        for index, title in enumerate(header)
    ]
    kept, left = [0], width - 1 - min(wide[0], _NAME + 3)
    for index in worth:
        if wide[index] <= left:
            kept.append(index)
            left -= wide[index]
    return sorted(kept)


def terminal_table(
    header: Cells, rows: Sequence[Cells], *, title: str, styles: Sequence[str | None] = ()
) -> Table:
    """Return a table for `Console.print`.

    Args:
        header: titles of the columns.
        rows: cells of each row; the first one, a name, stays on a line of its own up to 30
            characters, so that long ones leave the numbers room.
        title: above the table.
        styles: of each row, such as "bold"; none for rows beyond them.
    """
    from rich.table import Table
    from rich.text import Text  # as strings, names with brackets would be read as markup

    table = Table(title=Text(title, style="table.title"))
    short = all(len(cells[0]) <= _NAME for cells in rows)
    for index, name in enumerate(header):
        justify: Literal["left", "right"] = "right" if index else "left"
        table.add_column(Text(name), justify=justify, no_wrap=short and not index, overflow="fold")
    for index, cells in enumerate(rows):
        table.add_row(*map(Text, cells), style=styles[index] if index < len(styles) else None)
    return table
