"""Pages: their examples run, their tables are the committed results, their links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import importlib.util
import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from forked import python
from paths import ROOT

from metis_hf import MetisConfig, scheme_names

PAGES = sorted((ROOT / "docs").glob("*.md"))
OTHER_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
OTHER_PAGES += [ROOT / name for name in ("recipes/README.md", "benchmarks/README.md")]
REPORT = sorted((ROOT / "eval" / "results" / "report").glob("*.md"))
RECORDS = sorted((ROOT / "eval" / "results").rglob("*.md"))
OF_TODAY = [page for page in (*PAGES, *OTHER_PAGES, *RECORDS) if page.name != "CHANGELOG.md"]
MOST_WORDS = 32_000
DOCTESTED = ["metis_hf.numerics.formats", "metis_hf.numerics.storage"]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """benchmarks/numerics.py, under a name that does not hide tests/numerics."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(
        "numerics_report", ROOT / "benchmarks" / "numerics.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "benchmarks"))
    return module


FILE = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, *REPORT], ids=lambda page: page.name)
def test_examples_run(page, tmp_path):
    """Blocks whose first line is a comment with a file's name are that file."""
    files = FILE.findall(page.read_text())
    if not files:
        assert doctest.testfile(str(page), module_relative=False).failed == 0
        return
    for text, name in files:
        (tmp_path / name).write_text(text)
    # What these examples register is not left to other tests.
    python("-m", "doctest", page, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("name", DOCTESTED)
def test_docstring_examples_run(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    broken = []
    for page in (*PAGES, *OTHER_PAGES, *RECORDS):
        for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_every_page_is_linked_from_the_first():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    missing = [page.name for page in PAGES if f"docs/{page.name}" not in text]
    assert missing == ["index.md"]


SHELL = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(metis-hf \w[^`]*|python \w[^`]*)`")


def command_lines(page: Path) -> list[list[str]]:
    """Return the words of each command in a page's shell blocks and inline code."""
    text = page.read_text()
    blocks = "\n".join(SHELL.findall(text)).replace("\\\n", " ")
    lines = [*blocks.splitlines(), *(" ".join(found.split()) for found in INLINE.findall(text))]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_commands_are_those_of_the_command_line():
    """Every `metis-hf` command in a page exists, and so does each of its options."""
    click = pytest.importorskip("typer.main")
    from metis_hf.cli.main import app

    commands = click.get_command(app).commands
    told = [(page, words) for page in OF_TODAY for words in command_lines(page)]
    told = [(page, words) for page, words in told if words[0] == "metis-hf"]
    assert len(told) > 50
    for page, words in told:
        assert words[1] in commands, (page, words)
        command = commands[words[1]]
        context = command.context_class(command, info_name=words[1])
        try:
            command.make_parser(context).parse_args(words[2:])
        except Exception as error:
            raise AssertionError(f"{page}: {shlex.join(words)}") from error


def test_files_that_pages_name_exist():
    named = re.compile(r"\b(?:metis_hf|recipes|benchmarks|tests|eval/studies)/[\w/-]+\.(?:py|yaml)")
    texts = {
        page: page.read_text() for page in (*PAGES, *OTHER_PAGES) if page.name != "CHANGELOG.md"
    }
    missing = {
        (page.name, found)
        for page, text in texts.items()
        for found in named.findall(text)
        if not (ROOT / found).exists()
    }
    assert not missing


@pytest.mark.slow
def test_options_of_recipes_exist():
    used = {
        (script, word)
        for words in (words for page in OF_TODAY for words in command_lines(page))
        for script in words
        if re.fullmatch(r"recipes/\w+\.py", script)
        for word in words[words.index(script) :]
        if word.startswith("--")
    }
    if importlib.util.find_spec("trl") is None:
        used = {(script, word) for script, word in used if script != "recipes/sft_nvfp4.py"}
    scripts = {script for script, _ in used}
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    helps = {script: python(ROOT / script, "--help", env=env) for script in scripts}
    absent = {
        (script, word)
        for script, word in used
        if word.replace("-", "_") not in helps[script].replace("-", "_")
    }
    assert not absent


def test_pages_are_short():
    words = sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md"))
    assert words <= MOST_WORDS


def test_messages_are_quoted_as_they_are_printed():
    """The sources have all that troubleshooting.md quotes, but for names, numbers and dots."""
    of_transformers = {"Unknown quantization type, got metis"}
    texts = [
        re.sub(r"\s+", " ", node.value)
        for path in (ROOT / "metis_hf").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = re.sub(r"\s+", " ", (ROOT / "docs/troubleshooting.md").read_text())
    headings = " ".join(re.findall(r"\*\*(.*?)\*\*", page))
    quoted = set(re.findall(r'"([^"]+)"', headings)) - of_transformers
    assert len(quoted) > 10
    for message in quoted:
        for part in re.split(r"\.\.\.\S*|\d+|\(\w+\)|'[\w-]+'|\b(?:mps|DeepSpeed)\b", message):
            assert any(part.strip() in text for text in texts), message


def test_scheme_table_is_the_registry():
    text = (ROOT / "docs/schemes.md").read_text()
    table = text[: text.index("## ")]
    rows = re.findall(r"^\| \[?`([\w-]+)`", table, re.MULTILINE)
    assert sorted(rows) == sorted(scheme_names())


def test_numerics_pages_are_written_from_the_record(report):
    record = json.loads(report.JSON.read_text())
    assert set(record["tables"]) == set(report.SECTIONS)
    assert report.REPORT.read_text() == report.report(record)
    page = report.DOCS.read_text()
    shown = {name: report.markdown(table) for name, table in record["tables"].items()}
    assert page == report.with_tables(page, shown)
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(report.SECTIONS)


@pytest.mark.parametrize("section", ["levels", "order"])
def test_numerics_record_can_be_measured_again(report, section):
    """The quick tables, number by number; the last digit may differ between machines."""
    committed = json.loads(report.JSON.read_text())["tables"][section]
    measured = report.SECTIONS[section]()
    assert measured["columns"] == committed["columns"]
    for row, wanted in zip(measured["rows"], committed["rows"], strict=True):
        for cell, other in zip(row, wanted, strict=True):
            number, expected = (float(text.removesuffix(" %")) for text in (cell, other))
            assert number == pytest.approx(expected, rel=0.1, abs=0.02)


def test_config_page_names_every_field_with_its_default():
    page = (ROOT / "docs" / "config.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    assert set(rows) == {field.name for field in dataclasses.fields(MetisConfig)}
    defaults = MetisConfig()
    for name, shown in rows.items():
        value = getattr(defaults, name)
        if shown != "all three":
            assert ast.literal_eval(shown.strip("`")) == value, name
