"""`metis-hf schemes`: every registered scheme, what is at each operand, and in how many bits."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from layers.layer_tools import FP4_SCHEMES
from typer.testing import CliRunner

from metis_hf import scheme_names
from metis_hf.cli.main import app
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


def test_table_names_every_scheme(run):
    shown = run().stdout
    lines = [line.strip() for line in shown.splitlines()]
    assert set(scheme_names()) <= set(lines)  # each heads its operands
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("names", [[], ["metis"]], ids=["all", "metis"])
def test_no_word_is_broken_at_80_columns(names, run):
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
