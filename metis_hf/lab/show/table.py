"""Formats a table (a header and rows of text cells) as markdown, as LaTeX, or for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

Cells = Sequence[str]
_NAME = 30  # characters; names wrap in a terminal only if one is longer
_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "<": r"$<$",
        ">": r"$>$",
    }
)


def markdown_table(header: Cells, rows: Sequence[Cells]) -> str:
    """Return a GitHub markdown table; all columns but the first are right-aligned."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    lines = [[_markdown_cell(cell) for cell in cells] for cells in (header, rule, *rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _markdown_cell(text: str) -> str:
    """Escape text, such as a file name, so that it stays in its cell."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.splitlines()))


def latex_table(header: Cells, rows: Sequence[Cells]) -> str:
    """Return a `tabular` with booktabs rules; cells must be LaTeX already (`latex_text`)."""
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", "\\toprule"]
    lines += [" & ".join(header) + " \\\\", "\\midrule"]
    lines += [" & ".join(cells) + " \\\\" for cells in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def latex_text(text: str) -> str:
    """Escape LaTeX's special characters; a leading hyphen before a digit becomes a minus sign."""
    return re.sub(r"^-(?=\d)", "$-$", text.translate(_LATEX))


def fitting(header: Cells, rows: Sequence[Cells], width: int, worth: Sequence[int]) -> list[int]:
    """Return the columns, in order, that fit a terminal without breaking a cell.

    Args:
        header: column titles; they break only between words.
        rows: cells of each row.
        width: terminal width in characters.
        worth: columns by priority, without the first, which is always kept; a column that does
            not fit in the remaining width is left out.
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
        header: column titles.
        rows: cells of each row. The first cell is a name; names wrap only if one exceeds 30
            characters, to leave room for the numbers.
        title: title above the table.
        styles: style of each row, such as "bold"; further rows have none.
    """
    from rich.table import Table
    from rich.text import Text  # a plain str with brackets would be parsed as markup

    table = Table(title=Text(title, style="table.title"))
    short = all(len(cells[0]) <= _NAME for cells in rows)
    for index, name in enumerate(header):
        justify: Literal["left", "right"] = "right" if index else "left"
        table.add_column(Text(name), justify=justify, no_wrap=short and not index, overflow="fold")
    for index, cells in enumerate(rows):
        table.add_row(*map(Text, cells), style=styles[index] if index < len(styles) else None)
    return table
