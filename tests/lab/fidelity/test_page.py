"""Numbers on the page of a fidelity measurement, by hand."""

from __future__ import annotations

import html
import math
import re

import pytest

from metis_hf.lab.fidelity.fidelity_page import write_outputs
from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity

RECORD = {
    "settings": {"model": "m", "text": "t", "length": 8, "tokens_per_step": 8192},
    "held_out_tokens": 8, "gradient_sequences": 1, "gradient_batches": 1, "missing": 0,
}  # fmt: skip
ERRORS = {"y": 0.1, "dx": 0.1, "dw": 0.1}


def result(name, losses, cosines, **more):
    batches = [{"exact": 4.0, "loss": loss, "kl": 0.1, "top1": 1.0} for loss in losses]
    return SchemeFidelity(name, name, batches=batches, gradients={"cosine": cosines}, **more)


def page_of(out, *results):
    """Return the text of the page, a blank between two of its elements."""
    write_outputs(out, RECORD, results)
    text = re.sub(r"<(style|script)>.*?</\1>", "", (out / "index.html").read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_cards_show_the_smallest_rise_and_the_largest_cosine(tmp_path):
    near = result("near", [4.4, 4.4], [0.9, 0.9])
    low = result("low", [4.04, 4.12], [0.5, 0.7])
    lost = result("lost", [4.2, 4.2], [math.nan, 0.9])
    page = page_of(tmp_path, lost, near, low)
    for label, value, note in (
        ("exact loss", "4.0000", "nats per token, held-out"),
        ("smallest loss rise", "+2.00 ± 1.00 %", "low"),
        ("nearest gradient", "0.900 ± 0.000", "cosine, one batch: near"),
    ):
        assert re.search(rf"{label}\W+{re.escape(value)}\W+{note}|"
                         rf"{re.escape(value)}\W+{label}\W+{note}", page)  # fmt: skip


def test_layers_alone_are_listed_from_the_largest_divergence(tmp_path):
    layers = {"a": {"kl": 0.1, "loss": 0.5}, "b": {"kl": 0.3, "loss": -0.25}}
    alone = {"layers": layers, "whole": {"kl": 0.5, "loss": 1.0}}
    page = page_of(tmp_path, result("x", [4.0], [1.0], alone=alone))
    assert "sum to 0.4000 nats, all together give 0.5000;" in page
    assert "loss rises sum to +0.25 %, all together +1.00 %." in page
    assert "b 0.30000 75.0 -0.250 a 0.10000 25.0 +0.500" in page


def test_groups_of_layers_have_means_over_those_that_quantize(tmp_path):
    layers = {
        f"model.layers.{n}.mlp.up_proj": {"input": x, "weight": 20.0, "grad_output": math.inf}
        | ERRORS
        for n, x in enumerate((math.inf, 18.0, 22.0))
    }
    kinds = ("input", "weight", "grad_output")
    layers["model.layers.0.o_proj"] = dict(zip(kinds, (5.0, 6.0, 7.0))) | ERRORS
    layers["lm_head"] = dict.fromkeys(kinds, math.nan) | ERRORS
    page = page_of(tmp_path, result("x", [4.0], [1.0], layers=layers))
    assert "up_proj 20.0 20.0 exact 0.100 0.100 0.100" in page
    assert "o_proj 5.0 6.0 7.0 0.100" in page
    assert page.count("not finite") >= 3


def test_a_rise_is_in_percent_of_the_exact_mean():
    """So that the rises of batches have the rise of the whole text as their mean."""
    batches = [{"exact": 1.0, "loss": 1.1}, {"exact": 3.0, "loss": 3.1}]
    assert SchemeFidelity("a", "a", batches=batches).rise.mean == pytest.approx(5.0)
