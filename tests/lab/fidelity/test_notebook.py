"""recipes/fidelity.ipynb: its cells run one after another, and the last one shows the page."""

from __future__ import annotations

import ast
import html
import json
import re

import pytest
from paths import ROOT

NOTEBOOK = json.loads((ROOT / "recipes/fidelity.ipynb").read_text())


def run(source, scope):
    """Run a cell as a notebook does; return its last line's value if that is an expression."""
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr) or source.rstrip().endswith(";"):
        body, last = [*body, last], None
    exec(compile(ast.Module(body, []), "cell", "exec"), scope)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), scope)


def test_format():
    """Version 4.5 as its schema has it, without outputs: they are made where it runs."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    cells = NOTEBOOK["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        keys = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            keys |= {"execution_count", "outputs"}
            assert cell["execution_count"] is None
            assert cell["outputs"] == []
        assert set(cell) == keys


@pytest.mark.slow
def test_cells_run_and_show_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "__main__"}
    code = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    values = [run(source, scope) for source in code]
    divergences = {name: float(text.split()[0]) for name, text in values[1].items()}
    assert min(divergences.values()) > 0
    assert min(divergences, key=divergences.get) == "metis"  # as the text beside it says
    frame = values[-1]._repr_html_()
    page = html.unescape(re.fullmatch(r'<iframe srcdoc="([^"]*)".*</iframe>', frame)[1])
    assert page == (tmp_path / "runs/notebook/fidelity/index.html").read_text()
    assert all(name in page for name in divergences)
