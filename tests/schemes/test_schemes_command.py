"""`metis-hf schemes`: every registered scheme, what is at each operand, and in how many bits."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest
from layers.layer_tools import FP4_SCHEMES
from paths import ROOT
from typer.testing import CliRunner

from metis_hf import scheme_names
from metis_hf.cli.main import app
from metis_hf.lab.cost import scheme_overhead
from metis_hf.lab.scheme_list import FIRST, GROUPS
from metis_hf.numerics import Quantizer
from metis_hf.operands import AroundQuantizer, Operand
from metis_hf.schemes import Scheme, registry
from metis_hf.schemes.listing import SLOTS, WIDTH, list_schemes

SHOWN = ("format", "blocks", "along", "rounding", "conditioner")  # of an operand, as words
NVFP4, MXFP4, SQUARE = 4.5, 4.25, 4 + 8 / 256  # bits: a code and its share of a scale


@pytest.fixture(scope="module")
def run():
    def call(*arguments, columns=100):
        return CliRunner().invoke(app, ["schemes", *arguments], env={"COLUMNS": str(columns)})

    return call


def test_json_lists_every_scheme_and_operand(run):
    records = json.loads(run("--json").stdout)
    assert [record["name"] for record in records] == scheme_names()
    for record in records:
        assert record["summary"]
        assert record["source"]
        assert list(record["operands"]) == list(SLOTS.values())
        for operand in record["operands"].values():
            assert "reuses" in operand or 0 < operand["bits"] <= 16


def test_list_has_a_line_for_each_scheme(run):
    lines = [line for lines in GROUPS.values() for line in lines]
    assert sorted(line.name for line in lines) == sorted(scheme_names())
    for arguments, names in (([], FIRST), (["--all"], scheme_names())):
        shown = run(*arguments, columns=60).stdout.splitlines()
        assert max(map(len, shown)) <= 80
        first = [line.split()[0] for line in shown[1 : shown.index("")] if line[0] == " "]
        assert sorted(first) == sorted(names)
    assert len(FIRST) == 12


def test_groups_of_the_list_are_the_sections_of_the_page():
    page = (ROOT / "docs/schemes.md").read_text()
    anchors = dict(re.findall(r"^\| \[`([\w-]+)`\]\(#([\w-]+)\)", page, re.MULTILINE))
    sections, group = {}, ""
    for level, title in re.findall(r"^(##|###) (.+)$", page, re.MULTILINE):
        group = title if level == "##" else group
        sections[title.lower().replace(" ", "-")] = group
    found = {line.name: group for group, lines in GROUPS.items() for line in lines}
    assert found == {name: sections[anchor] for name, anchor in anchors.items()}


def test_numbers_of_the_list_are_counted_and_on_record():
    tiny, larger = {}, {}
    for record in ("metis", "averis", None, "newer"):  # the first that has a scheme counts
        path = f"eval/results/methods-tiny{f'-{record}' if record else ''}.json"
        for summary in json.loads((ROOT / path).read_text())["summaries"]:
            if summary["gap"] is not None:
                tiny.setdefault(summary["name"], round(summary["gap"]["mean"], 2))
    runs = json.loads((ROOT / "eval/results/scale-30m/h200-431dd60.json").read_text())
    losses = {r["scheme"]: r["loss"] for r in runs["parts"]["scale"]["items"].values()}
    for name, loss in losses.items():
        if name != "bf16":
            larger[name] = round(100 * (loss / losses["bf16"] - 1), 2)
    assert larger
    listed = {line.name: line for lines in GROUPS.values() for line in lines}
    assert {n: x.tiny for n, x in listed.items()} == {n: tiny.get(n) for n in listed}
    assert {n: x.larger for n, x in listed.items()} == {n: larger.get(n) for n in listed}
    extra = {n: f"{100 * scheme_overhead(n).share:.1f}" for n in listed}
    assert {n: f"{x.extra:.1f}" for n, x in listed.items()} == extra


def test_schemes_of_a_users_file_are_in_the_list(run, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "SCHEMES", dict(registry.SCHEMES))
    own = tmp_path / "listed_schemes.py"
    own.write_text(
        "from metis_hf.schemes import register_scheme\n"
        "from metis_hf.schemes.nvidia import nvidia\n"
        "register_scheme('listed', summary='mine, said in many more words than a line has room "
        "for', source='')(nvidia)\n"
    )
    shown = run("--import", str(own)).stdout.splitlines()
    (line,) = (line.split() for line in shown if line.strip().startswith("listed"))
    assert (line[1], line[-1]) == ("mine,", "0.3")


def test_a_mode_of_the_list_is_refused(run):
    assert "name schemes, or use --json" in str(run("--mode", "shared").exception)


def test_no_word_is_broken_at_80_columns(run):
    names = scheme_names()
    shown = run(*names, columns=80).stdout
    assert max(map(len, shown.splitlines())) <= 80
    whole = set(shown.split())
    for record in list_schemes(names):
        texts = [record["name"], record["summary"], record["source"]]
        for operand in record["operands"].values():
            texts += [str(operand.get(key) or "") for key in SHOWN]
        words = {word for text in texts for word in text.split()} - {"identity"}
        assert words <= whole, (record["name"], words - whole)


def test_some_schemes_in_a_mode(run):
    halo, nvidia = json.loads(run("halo", "nvidia", "--mode", "contraction", "--json").stdout)
    assert halo["operands"]["wgrad.input"]["conditioner"] == "full hadamard (across)"
    assert halo["operands"]["dgrad.weight"] == {"reuses": "fprop.weight"}
    # A scheme without the mode is shown in the one that it has.
    del nvidia["extra_multiply_adds"]
    assert list_schemes(["nvidia"], "shared") == [nvidia]


def test_multiply_adds_beyond_the_gemms(run):
    """Of nvidia: both operands of wgrad rotated by 16 x 16 matrices, 16 (i + o) / (3 i o) each."""
    records = {r["name"]: r["extra_multiply_adds"] for r in json.loads(run("--json").stdout)}
    assert records["nvfp4-rne"] == records["bf16"] == 0
    assert records["nvidia"] == pytest.approx(16 * 2 * WIDTH / (3 * WIDTH**2), abs=1e-5)
    # 64 directions of x and 16 of dy, of 4096: 4 (64 + 16) / (3 x 4096), and how they are found.
    assert 4 * (64 + 16) / (3 * 4096) < records["metis"] < 0.045
    shown = f"extra multiply-adds {100 * records['metis']:.1f} %".split()
    assert shown in [line.split() for line in run("metis").stdout.splitlines()]


def test_bits():
    for scheme, slot, bits in (
        ("nvfp4", "fprop.input", NVFP4),
        ("mxfp4", "fprop.input", MXFP4),
        ("nvidia", "fprop.weight", SQUARE),
        ("bf16", "fprop.weight", 16),
        ("mean", "fprop.input", NVFP4 * (1 + 1 / WIDTH)),  # and the mean
        ("metis", "fprop.input", NVFP4 * (1 + 2 * 64 / WIDTH)),  # and factors of rank 64
        ("metis", "fprop.weight", NVFP4),
    ):
        (record,) = list_schemes([scheme])
        # Rounded to three places; tensor scales and lengths of directions are 32 bits each.
        assert record["operands"][slot]["bits"] == pytest.approx(bits, abs=1e-3), (scheme, slot)
    # Corrections: errors of the weight along directions of inputs, and of output gradients.
    (record,) = list_schemes(["metis"])
    for slot, directions in (("fprop.weight", 64), ("dgrad.weight", 16)):
        bits = record["operands"][slot]["correction"]["bits"]
        assert bits == pytest.approx(NVFP4 * directions / WIDTH, abs=1e-3)


def test_no_operand_of_an_fp4_scheme_is_in_high_precision():
    for record in list_schemes(FP4_SCHEMES):
        for slot, operand in record["operands"].items():
            assert operand.get("format") != "high precision", (record["name"], slot)


@dataclass(frozen=True)
class Halved(AroundQuantizer):
    """Looks at its matrix."""

    def forward(self, x, *, dim):
        return x / 2 if x.abs().max() > 6 else x


def test_bits_of_what_looks_at_values_are_unknown(run, monkeypatch):
    monkeypatch.setattr(registry, "SCHEMES", dict(registry.SCHEMES))
    scheme = Scheme(Operand(Quantizer(), Halved()), Operand(Quantizer()), Operand(Quantizer()))
    registry.register_scheme("own", summary="", source="")(lambda config, rank: scheme)
    (record,) = list_schemes(["own"])
    assert record["operands"]["fprop.input"]["bits"] is None
    assert record["operands"]["fprop.weight"]["bits"] == NVFP4
    (line,) = (line.split() for line in run("own").stdout.splitlines() if "input: fprop" in line)
    assert line[-1] == "?"


def test_unknown_names_and_modes_are_refused():
    with pytest.raises(ValueError, match="did you mean 'halo'"):
        list_schemes(["hallo"])
    with pytest.raises(ValueError, match="operand_mode"):
        list_schemes(["nvfp4"], "both")
