"""One self-contained HTML page made of text, figures, tables and key figures.

A page needs no network and no second file: pictures are embedded, styles and the few lines of
script (sorting tables) are inline. It opens in any browser and prints.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from metis_hf.shared.records import write_atomically


@dataclass(frozen=True)
class Cell:
    """A table cell.

    Args:
        text: what is shown.
        value: what sorting uses; NaN sorts last. None sorts by the text.
        shade: 0 to 1, how strongly the cell is coloured; 0 is none.
        note: shown where the pointer rests.
    """

    text: str
    value: float | None = None
    shade: float = 0.0
    note: str = ""


def number(value: float, spec: str = ".3g", *, shade: float = 0.0) -> Cell:
    """Return a numeric cell; NaN and infinity are shown as such and flagged."""
    if not math.isfinite(value):
        return Cell(str(value), value, 1.0, "not finite")
    return Cell(format(value, spec), value, shade)


@dataclass
class Page:
    """A page in the making; every method appends and returns the page.

    Args:
        title: heading, and the browser's title.
        subtitle: a line below it.
    """

    title: str
    subtitle: str = ""
    _blocks: list[dict[str, Any]] = field(default_factory=list)

    def section(self, title: str, *paragraphs: str, folded: bool = False) -> Page:
        """Append a heading, which the table of contents lists, and plain-text paragraphs.

        A folded section shows its heading alone, until the reader opens it.
        """
        anchor = f"s{sum(block['kind'] == 'section' for block in self._blocks)}"
        block = {"kind": "section", "title": title, "anchor": anchor, "folded": folded}
        self._blocks.append(block)
        return self.text(*paragraphs)

    def text(self, *paragraphs: str) -> Page:
        """Append paragraphs of plain text."""
        self._blocks += [{"kind": "text", "text": text} for text in paragraphs]
        return self

    def notice(self, text: str) -> Page:
        """Append a line that must not be overlooked: something is missing or broken."""
        self._blocks.append({"kind": "notice", "text": text})
        return self

    def cards(self, *cards: tuple[str, str, str]) -> Page:
        """Append key figures side by side: (label, value, note) each."""
        self._blocks.append({"kind": "cards", "cards": cards})
        return self

    def figure(self, picture: bytes | Path, caption: str, *, wide: bool = True) -> Page:
        """Append a PNG picture, as bytes or as a file; `wide=False` lets two share a line."""
        data = picture if isinstance(picture, bytes) else picture.read_bytes()
        encoded = base64.b64encode(data).decode()
        self._blocks.append({"kind": "figure", "data": encoded, "caption": caption, "wide": wide})
        return self

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[Cell | str]], caption: str = ""
    ) -> Page:
        """Append a table that sorts by a click on a column's head."""
        cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
        for row in cells:
            if len(row) != len(header):
                raise ValueError(f"a row has {len(row)} cells, the header {len(header)}")
        # Columns of words are set flush left, columns of numbers flush right.
        columns = list(zip(*cells)) if cells else [()] * len(header)
        words = [i for i, column in enumerate(columns) if all(c.value is None for c in column)]
        table = {"header": header, "rows": cells, "caption": caption, "words": words}
        self._blocks.append({"kind": "table", **table})
        return self

    def render(self) -> str:
        """Return the whole page as HTML."""
        try:
            import jinja2
        except ImportError as error:  # pragma: no cover
            raise ImportError(
                'HTML pages need jinja2, which is not installed; pip install "metis-hf[eval]"'
            ) from error
        environment = jinja2.Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        source = files(__package__).joinpath("page.html").read_text("utf-8")
        template = environment.from_string(source)
        return template.render(title=self.title, subtitle=self.subtitle, blocks=self._blocks)

    def save(self, path: Path) -> None:
        """Write the page, whole or not at all."""
        # What UTF-8 cannot hold, half a surrogate pair out of a broken record, becomes "?".
        page = self.render().encode("utf-8", errors="replace")
        write_atomically(path, lambda file: file.write(page))
