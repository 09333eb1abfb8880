"""Prose is written to a colleague: no phrase that sends the reader back to look for a noun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

FORBIDDEN = ("Return what", "Return how", "of what", "that of", "those of", "anew", "so do")
PHRASE = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.IGNORECASE)
LINE_BREAK = re.compile(r"\s*\n\s*(?:#:?|>)?\s*")
FILES = [
    path
    for folder, pattern in (
        ("docs", "**/*.md"),
        ("recipes", "*.md"),
        ("recipes", "*.py"),
        (".", "*.md"),
        ("metis_hf", "**/*.py"),
    )
    for path in sorted((ROOT / folder).glob(pattern))
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


def test_no_file_has_a_forbidden_phrase():
    """Write the noun again: "the scale of the weight", not "that of the weight"."""
    assert len(FILES) > 100
    assert not {str(path.relative_to(ROOT)): here for path in FILES if (here := found(path))}
