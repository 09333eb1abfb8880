"""A self-contained HTML page of text, figures, tables and cards with key numbers.

A page needs no network and no second file: images are embedded, and styles and the short script
that sorts tables are inline. It opens in any browser and prints.
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
    """A table cell."""

    text: str
    value: float | None = None  # sort key; NaN sorts last, None sorts by the text
    shade: float = 0.0  # color intensity, 0 (none) to 1
    note: str = ""  # tooltip


def number(value: float, spec: str = ".3g", *, shade: float = 0.0) -> Cell:
    """Return a numeric cell; NaN and infinity are shown and flagged."""
    if not math.isfinite(value):
        return Cell(str(value), value, 1.0, "not finite")
    return Cell(format(value, spec), value, shade)


@dataclass
class Page:
    """A page under construction; methods that append return the page."""

    title: str  # heading and browser title
    subtitle: str = ""  # line below the heading
    _blocks: list[dict[str, Any]] = field(default_factory=list)

    def section(self, title: str, *paragraphs: str, folded: bool = False) -> Page:
        """Append a heading, listed in the table of contents, and plain-text paragraphs.

        A folded section shows only its heading until the reader opens it.
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
        """Append a prominent warning line, for missing or broken results."""
        self._blocks.append({"kind": "notice", "text": text})
        return self

    def cards(self, *cards: tuple[str, str, str]) -> Page:
        """Append cards with key numbers side by side: (label, value, note) each."""
        self._blocks.append({"kind": "cards", "cards": cards})
        return self

    def figure(self, picture: bytes | Path, caption: str, *, wide: bool = True) -> Page:
        """Append a PNG, as bytes or as a file; `wide=False` lets two figures share a row."""
        data = picture if isinstance(picture, bytes) else picture.read_bytes()
        encoded = base64.b64encode(data).decode()
        self._blocks.append({"kind": "figure", "data": encoded, "caption": caption, "wide": wide})
        return self

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[Cell | str]], caption: str = ""
    ) -> Page:
        """Append a table that sorts on a click on a column header."""
        cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
        for row in cells:
            if len(row) != len(header):
                raise ValueError(f"a row has {len(row)} cells, but the header has {len(header)}")
        # Text columns are left-aligned, number columns right-aligned.
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
        """Write the page atomically."""
        # Lone surrogates from a broken record, which UTF-8 cannot encode, become "?".
        page = self.render().encode("utf-8", errors="replace")
        write_atomically(path, lambda file: file.write(page))
