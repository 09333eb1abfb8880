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


def result(name, losses, cosines, *, kl=(0.1, 0.1), **more):
    batches = [
        {"exact": 4.0, "loss": loss, "kl": each, "top1": 1.0} for loss, each in zip(losses, kl)
    ]
    return SchemeFidelity(name, name, batches=batches, gradients={"cosine": cosines}, **more)


def page_of(out, *results):
    """Return the text of the page, a blank between two of its elements."""
    write_outputs(out, RECORD, results)
    text = re.sub(r"<(style|script)>.*?</\1>", "", (out / "index.html").read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_cards_and_table_lead_with_the_smallest_divergence(tmp_path):
    """Another scheme has a smaller rise of the loss, by luck, and one has a nearer gradient."""
    lucky = result("lucky", [4.0, 4.0], [0.9, 0.9], kl=(0.3, 0.3))
    near = result("near", [4.04, 4.12], [0.5, 0.7], kl=(0.02, 0.04))
    lost = result("lost", [4.2, 4.2], [math.nan, 0.9], kl=(math.nan, 0.1))
    page = page_of(tmp_path, lost, lucky, near)
    for card in (
        "smallest KL 0.0300 ± 0.0100 nats per token: near",
        "its loss rise +2.00 ± 1.00 % of the exact loss",
        "its gradient 0.600 ± 0.100 cosine, one batch",
        "exact loss 4.0000 nats per token, held-out",
    ):
        assert card in page
    assert "Scheme KL (nats) Loss rise %" in page
    assert "near 0.0300 ± 0.0100 +2.00 ± 1.00" in page


def test_the_divergence_of_training_counts_where_it_differs(tmp_path):
    noisy = result("noisy", [4.1], [1.0], kl=[0.01], training=[{"kl": 0.5}])
    page = page_of(tmp_path, noisy, result("steady", [4.1], [1.0], kl=[0.2]))
    assert "smallest KL 0.2000 nats per token: steady" in page


def test_what_was_not_measured_and_what_may_mislead_are_on_top(tmp_path):
    refused = SchemeFidelity("refused", "metis", note="rank=32 keeps 32 of 32 directions")
    page = page_of(tmp_path, refused, result("few", [4.1], [1.0], warning="a batch of 48 tokens"))
    assert "refused was not measured: rank=32 keeps 32 of 32 directions. " in page
    assert "few: a batch of 48 tokens. " in page
    assert page.index("few: a batch") < page.index("smallest KL")


def test_layers_alone_are_listed_from_the_largest_divergence(tmp_path):
    layers = {"a": {"kl": 0.1, "loss": 0.5}, "b": {"kl": 0.3, "loss": -0.25}}
    alone = {"layers": layers, "whole": {"kl": 0.5, "loss": 1.0}}
    page = page_of(tmp_path, result("x", [4.0], [1.0], alone=alone))
    assert "sum to 0.4000 nats; with all layers quantized together, the KL is 0.5000." in page
    assert "loss rises sum to +0.25 %; together, the loss rise is +1.00 %." in page
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
