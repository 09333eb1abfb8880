"""Prose is written to a colleague: no phrase that sends the reader back to look for a noun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

FORBIDDEN = ("Return what", "Return how", "of what", "that of", "those of", "anew", "so do")
PHRASE = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.IGNORECASE)
LINE_BREAK = re.compile(r"\s*\n\s*(?:#:?|>)?\s*")
PENDING = {"schemes.md", "data.md", "evaluation.md", "config.md", "CHANGELOG.md"}
PAGES = [
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if page.name not in PENDING
]


def found(path: Path) -> list[str]:
    """Return the forbidden phrases of a file with the words around them, across line breaks."""
    text = LINE_BREAK.sub(" ", path.read_text())
    return [text[max(0, m.start() - 30) : m.end() + 30] for m in PHRASE.finditer(text)]


@pytest.mark.parametrize("text", ["# the amax of\n    # what is read", "So do layers"])
def test_phrases_are_found_across_lines(text, tmp_path):
    file = tmp_path / "a.py"
    file.write_text(text)
    assert found(file)


def test_pages_have_no_forbidden_phrase():
    """Write the noun again: "the scale of the weight", not "that of the weight"."""
    assert not {str(page.relative_to(ROOT)): here for page in PAGES if (here := found(page))}
