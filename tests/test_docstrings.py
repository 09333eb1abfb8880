"""Docstrings say what a function does; ruff (D401) asks for the imperative mood."""

from __future__ import annotations

import ast

from paths import ROOT

FILES = sorted((ROOT / "metis_hf").rglob("*.py"))
QUESTIONS = {"What", "Whether", "How", "Which", "Why"}


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


def test_what_returns_nothing_says_so():
    silent = [
        (place, text)
        for place, node, text in docstrings()
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.returns, ast.Constant)
        and node.returns.value is None
    ]
    assert len(silent) > 50
    assert not [place for place, text in silent if text.split()[0] in {"Return", "Returns"}]
