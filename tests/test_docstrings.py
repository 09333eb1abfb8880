"""Docstrings open with a verb and a noun, and no word sends the reader back."""

from __future__ import annotations

import ast
import re

from paths import ROOT

FILES = sorted((ROOT / "metis_hf").rglob("*.py"))
QUESTIONS = {"What", "Whether", "How", "Which", "Why"}
NO_VERBS = {"The", "A", "An", "Of", "That", "Those", "This", "These", "One", "Its", "As", "In"}
# Rooms whose functions open with one of these; a new verb is added here.
PLAIN_ROOMS = ("export", "fidelity", "monitoring", "planning", "run_report")
VERBS = re.compile(
    "(Add|Choose|Compare|Convert|Copy|Count|Delete|Draw|Drop|Give|Join|Keep|Label|Let|List|Measure|"
    "Name|Open|Pack|Parse|Print|Put|Quantize|Read|Record|Refuse|Remove|Return|Run|Set|Share|Start|"
    r"Stop|Store|Tell|Trace|Write|Yield)\b"
)
RIDDLES = re.compile(r"\b(anew|the latter|the former)\b")


def docstrings():
    """Yield (place, node, docstring) of everything that has one."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                yield place, node, text


def test_no_docstring_opens_with_a_question():
    assert not [place for place, _, text in docstrings() if text.split()[0] in QUESTIONS]


def test_functions_open_with_a_verb():
    functions = [
        (place, text)
        for place, node, text in docstrings()
        if isinstance(node, ast.FunctionDef)
        and not any("property" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert len(functions) > 500
    assert not [place for place, text in functions if text.split()[0] in NO_VERBS]
    assert not [place for place, text in functions if not text[0].isupper()]
    plain = [(p, text) for p, text in functions if p.split("/")[1] in PLAIN_ROOMS]
    assert len(plain) > 100
    assert not [place for place, text in plain if not VERBS.match(text)]


def test_what_returns_nothing_says_so():
    silent = [
        (place, text)
        for place, node, text in docstrings()
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.returns, ast.Constant)
        and node.returns.value is None
    ]
    assert len(silent) > 100
    assert not [place for place, text in silent if text.split()[0] in {"Return", "Returns"}]


def test_no_word_sends_the_reader_back():
    assert not [place for place, _, text in docstrings() if RIDDLES.search(text)]
