"""Numbers on the page of a fidelity measurement, by hand."""

from __future__ import annotations

import math

import pytest

from metis_hf.lab.fidelity.fidelity_page import _alone, _cards, _group_rows
from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity
from metis_hf.lab.show.page import Page


def result(name, losses, cosines, **more):
    batches = [{"exact": 4.0, "loss": loss, "kl": 0.1} for loss in losses]
    return SchemeFidelity(name, name, batches=batches, gradients={"cosine": cosines}, **more)


def test_cards_are_of_the_smallest_rise_and_the_largest_cosine():
    near = result("near", [4.4, 4.4], [0.9, 0.9])
    low = result("low", [4.04, 4.12], [0.5, 0.7])
    lost = result("lost", [4.2, 4.2], [math.nan, 0.9])
    assert _cards([lost, near, low]) == [
        ("exact loss", "4.0000", "nats per token, held-out"),
        ("smallest loss rise", "+2.00 ± 1.00 %", "low"),
        ("nearest gradient", "0.900 ± 0.000", "cosine, one batch: near"),
    ]


def test_layers_alone_are_listed_from_the_largest_divergence():
    layers = {"a": {"kl": 0.1, "loss": 0.5}, "b": {"kl": 0.3, "loss": -0.25}}
    found = result("x", [4.0], [1.0], alone={"layers": layers, "whole": {"kl": 0.5, "loss": 1.0}})
    page = Page("title", "subtitle")
    _alone(page, found)
    text, table = page._blocks
    assert "sum to 0.4000 nats, all together give 0.5000;" in text["text"]
    assert "loss rises sum to +0.25 %, all together +1.00 %." in text["text"]
    shown = [[cell.text for cell in row] for row in table["rows"]]
    assert shown == [["b", "0.30000", "75.0", "-0.250"], ["a", "0.10000", "25.0", "+0.500"]]


def test_groups_have_means():
    columns = ("input", "weight", "grad_output", "y", "dx", "dw")
    names = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.0.o_proj")
    layers = {
        name: {column: place + number for number, column in enumerate(columns)}
        for place, name in zip((20.0, 22.0, 5.0), names)
    }
    rows = _group_rows(result("x", [4.0], [1.0], layers=layers))
    assert [[cell.text for cell in row] for row in rows] == [
        ["up_proj", "21.0", "22.0", "23.0", "24.000", "25.000", "26.000"],
        ["o_proj", "5.0", "6.0", "7.0", "8.000", "9.000", "10.000"],
    ]


def test_an_operand_that_is_not_quantized_is_exact():
    """And no alarm; where some layers quantize it, the mean is theirs."""
    errors = {"y": 0.1, "dx": 0.1, "dw": 0.1}
    layers = {
        f"model.layers.{n}.mlp.up_proj": {"input": x, "weight": 20.0, "grad_output": math.inf}
        | errors
        for n, x in enumerate((math.inf, 18.0, 22.0))
    }
    layers["lm_head"] = dict.fromkeys(("input", "weight", "grad_output"), math.nan) | errors
    up, head = _group_rows(result("x", [4.0], [1.0], layers=layers))
    assert [cell.text for cell in up[1:4]] == ["20.0", "20.0", "exact"]
    assert (up[3].value, up[3].shade, up[3].note) == (math.inf, 0.0, "")
    assert [cell.note for cell in head[1:4]] == ["not finite"] * 3


def test_a_rise_is_in_percent_of_the_exact_mean():
    """So that the rises of batches have the rise of the whole text as their mean."""
    batches = [{"exact": 1.0, "loss": 1.1}, {"exact": 3.0, "loss": 3.1}]
    assert SchemeFidelity("a", "a", batches=batches).rise.mean == pytest.approx(5.0)
