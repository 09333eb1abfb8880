"""Docstrings open with a verb and a noun, and no word sends the reader back."""

from __future__ import annotations

import ast
import re

from paths import ROOT

FILES = sorted((ROOT / "metis_hf").rglob("*.py"))
QUESTIONS = {"What", "Whether", "How", "Which", "Why"}
# Of functions; a new one is added here.
VERBS = set(
    re.findall(
        r"\w+",
        """
        Add Analyze Announce Append Apply Assign Begin Block Bring Broadcast Build Cache Call
        Carry Cast Change Check Choose Chunk Claim Clamp Close Collect Compare Compile Compute
        Convert Copy Count Cut Decompose Delete Divide Do Draw Drop End Evaluate Factor Fake
        Fetch Find Fix Forget Format Freeze Give Hash Hold Import Invert Join Keep Label Lay
        Leave Let List Load Look Make Map Measure Merge Move Multiply Name Negate Note Open
        Order Pack Pad Parse Part Pick Print Put Quantize Raise Read Record Refresh Refuse
        Register Remember Remove Repeat Replace Restore Return Reuse Rotate Round Run Save Say
        Scale See Set Share Show Silence Smooth Sort Split Start Stop Store Take Tell Trace
        Train Transform Turn Undo Unfix Unpack Wait Warn Wrap Write Yield
        """,
    )
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
    assert not [place for place, text in functions if re.match(r"\w*", text)[0] not in VERBS]


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
