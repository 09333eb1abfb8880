"""`metis-hf fidelity --configs` with a config that quantizes attention."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers

from lab.fidelity.measuring import gradients, load, settings, token_ids
from metis_hf import MetisConfig, get_metis_model
from metis_hf.cli.main import main
from metis_hf.lab.fidelity.measurements import fidelity

pytestmark = pytest.mark.usefixtures("no_pictures")

CHOICE = {"scheme": "nvfp4-rne", "attention": "nvfp4-rne"}
CONFIG = MetisConfig(**CHOICE)


@pytest.fixture(scope="module")
def results(place, tmp_path_factory):
    """The row with attention, beside two that would show if it stayed in the model."""
    folder = tmp_path_factory.mktemp("attention")
    (folder / "with-attention.json").write_text(CONFIG.to_json())
    (folder / "after.json").write_text(CONFIG.replace(attention=None).to_json())
    chosen = settings(
        place,
        schemes=("nvfp4-rne",),
        configs=(folder / "with-attention.json", folder / "after.json"),
        alone=("nvfp4-rne", "with-attention"),
    )
    return dict(zip(("before", "with", "after"), fidelity(chosen, folder / "out"), strict=True))


@pytest.mark.slow
def test_losses_are_those_of_a_converted_model(place, results):
    exact, model = load(place).eval(), get_metis_model(load(place), CONFIG).eval()
    for ids, found in zip(token_ids(place)[:8].split(2), results["with"].batches, strict=True):
        with torch.no_grad():
            loss, plain = (m(input_ids=ids, labels=ids).loss.item() for m in (model, exact))
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["exact"] == pytest.approx(plain, rel=1e-6)


def test_gradients_are_those_of_a_converted_model(place, results):
    rows = [gradients(place, **options) for options in ({"scheme": "bf16"}, CHOICE)]
    for exact, grad, error in zip(*rows, results["with"].gradients["error"], strict=True):
        assert error == pytest.approx(((grad - exact).norm() / exact.norm()).item(), rel=1e-5)


def test_single_kinds_and_layers_are_measured_in_an_exact_attention(results):
    """They equal the same scheme's without it; the model is exact again afterwards."""
    before, found, after = (results[name] for name in ("before", "with", "after"))
    assert found.layers == before.layers
    for kind in ("input", "weight", "grad_output"):
        assert found.kinds[kind] == before.kinds[kind]
    assert found.kinds["all"] != before.kinds["all"]
    assert found.alone["layers"] == before.alone["layers"]
    assert found.alone["whole"] != before.alone["whole"]
    for name in ("batches", "kinds", "layers"):
        assert getattr(after, name) == getattr(before, name)
    assert after.gradients == before.gradients
    assert found.gradients["mean"]["error"] > before.gradients["mean"]["error"]


def test_command(place, tmp_path, monkeypatch, capsys):
    """A row in the table; a scheme that attention does not take has the reason beside its row."""
    (tmp_path / "good.json").write_text(CONFIG.to_json())
    (tmp_path / "bad.json").write_text(CONFIG.replace(attention="metis").to_json())
    configs = f"{tmp_path / 'good.json'},{tmp_path / 'bad.json'}"
    command = [
        "metis-hf", "fidelity", str(place / "model"), "--text", str(place / "text.txt"),
        "--schemes", "mxfp4", "--configs", configs, "--out", str(tmp_path / "out"),
        "--limit", "9", "--sequence-length", "24", "--batch", "2", "--device", "cpu",
        "--alone", "none",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "mxfp4" in printed
    assert "index.html" in printed
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["schemes"]
    assert [row["name"] for row in rows] == ["mxfp4", "good", "bad"]
    assert rows[1]["batches"]
    assert "attention='metis' cannot be the scheme" in rows[2]["note"]
    assert isinstance(load(place), transformers.LlamaForCausalLM)
