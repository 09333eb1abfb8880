"""Analyses that are interrupted, repeated, watched: what is there when, and what is made again."""

from __future__ import annotations

import io

import pytest
import torch
import transformers
from rich.console import Console

from lab.analyze.analyzed import save_llama
from metis_hf.lab import store
from metis_hf.lab.analyze import (
    analyze,
    capture,
    portrait,
    spectra,
)
from metis_hf.lab.analyze import spectrum_figures as figures

LAYERS = "layers.1.mlp"
LINES = 3 * 3  # three layers: weight, activation, gradient


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_llama(folder, folder / "text.py")
    return folder


@pytest.fixture
def calls(monkeypatch):
    """What is called how often: lines, portraits, pictures, models loaded; nothing is drawn."""
    found = {"line": 0, "portrait": 0, "picture": 0, "model": 0}

    def count(name, made):
        def wrapped(*args, **kwargs):
            found[name] += 1
            return made(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(portrait, "tensor_line", count("line", portrait.tensor_line))
    monkeypatch.setattr(portrait, "tensor_portrait", count("portrait", portrait.tensor_portrait))
    monkeypatch.setattr(capture, "load_model", count("model", capture.load_model))
    monkeypatch.setattr(figures, "as_png", count("picture", lambda figure, title: b"png"))
    return found


def analyzed(checkpoint, out, **changes):
    options = {"text": checkpoint / "text.py", "sequences": 20, "length": 8, "layers": LAYERS}
    return analyze([checkpoint], out, **options | changes)


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """(result, page) of an analysis that nothing disturbed; nothing is drawn."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "as_png", lambda figure, title: b"png")
        return analyzed(checkpoint, out), (out / "index.html").read_text()


def interrupted(monkeypatch, name, after):
    """Make a function of `portrait` end the process's work at a call."""
    made, left = getattr(portrait, name), [after]

    def wrapped(*args, **kwargs):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return made(*args, **kwargs)

    monkeypatch.setattr(portrait, name, wrapped)


def same(a, b):
    assert list(a.lines) == list(b.lines)
    for part in ("lines", "portraits", "residuals", "universality", "ranks", "notes", "missing"):
        assert getattr(a, part) == getattr(b, part)


class TestInterrupted:
    @pytest.mark.parametrize(
        ("where", "after", "said"),
        [
            pytest.param(
                "tensor_line",
                2,
                "the weights of 2 more layers are not measured yet",
                marks=pytest.mark.slow,
            ),
            ("tensor_line", 5, "activations and gradients are not measured yet"),
            pytest.param(
                "tensor_portrait",
                2,
                "figures of single layers are not drawn yet",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_keeps_what_it_has(
        self, where, after, said, checkpoint, whole, calls, tmp_path, monkeypatch
    ):
        """The page is there and says what is missing; another run makes the rest alone."""
        console = Console(file=io.StringIO(), width=300)
        with monkeypatch.context() as patch:
            interrupted(patch, where, after)
            with pytest.raises(KeyboardInterrupt):
                analyzed(checkpoint, tmp_path / "cut", console=console)
        assert (
            f"interrupted: {tmp_path}/cut/index.html shows the results so far"
            in console.file.getvalue()
        )
        page = (tmp_path / "cut" / "index.html").read_text()
        assert said in page
        assert "run the same command again to continue" in page
        assert page.count("data:image/png") >= 5
        calls |= dict.fromkeys(calls, 0)
        same(analyzed(checkpoint, tmp_path / "cut"), whole[0])
        assert calls["line"] == LINES - (after if where == "tensor_line" else LINES)
        assert calls["portrait"] == 3 - (after if where == "tensor_portrait" else 1)
        page = (tmp_path / "cut" / "index.html").read_text()
        assert "Not complete" not in page
        assert page == whole[1]


class TestRepeated:
    def test_nothing_is_made_twice(self, checkpoint, whole, calls, tmp_path):
        console = Console(file=io.StringIO(), width=120)
        first = analyzed(checkpoint, tmp_path, console=console)
        same(first, whole[0])
        for phase in ("weights", "activations and gradients", "text", "figures"):
            assert f"{phase} begins" in console.file.getvalue()  # without a terminal
        calls |= dict.fromkeys(calls, 0)
        same(analyzed(checkpoint, tmp_path), first)
        assert set(calls.values()) == {0}

    @pytest.mark.slow
    def test_other_settings_are_measured(self, checkpoint, calls, tmp_path):
        """Each by what it depends on: the text is nothing to a weight."""
        analyzed(checkpoint, tmp_path)
        for changes, lines in (({"sequences": 10}, 6), ({"rank": 4}, LINES), ({"text": None}, 3)):
            calls["line"] = 0
            result = analyzed(checkpoint, tmp_path, **changes)
            assert calls["line"] == lines
            same(result, analyzed(checkpoint, tmp_path / f"new-{lines}", **changes))

    def test_other_weights_and_other_code_are_measured(
        self, checkpoint, calls, tmp_path, monkeypatch
    ):
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        model.save_pretrained(tmp_path / "model")
        options = {"text": None, "layers": LAYERS}
        first = analyze([tmp_path / "model"], tmp_path / "out", **options)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(2).add_(1)
        model.save_pretrained(tmp_path / "model")
        second = analyze([tmp_path / "model"], tmp_path / "out", **options)
        name = "model.layers.1.mlp.up_proj"
        assert first.lines[name]["weight"]["sigma"] != second.lines[name]["weight"]["sigma"]
        calls["line"] = 0
        monkeypatch.setattr(store, "numerics_digest", lambda: "changed")
        analyze([tmp_path / "model"], tmp_path / "out", **options)
        assert calls["line"] == 3


def test_layers_with_one_input_share_its_spectrum(monkeypatch):
    made = []
    real = spectra.singular_values
    monkeypatch.setattr(spectra, "singular_values", lambda x: made.append(1) or real(x))
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    last = spectra.LastSpectrum()
    first = last.of(x)
    assert torch.equal(last.of(x.view(40, 16).detach()), first)
    assert len(made) == 1
    x.mul_(2)  # the same memory with other values
    assert torch.allclose(last.of(x), 2 * first)
    assert not torch.equal(last.of(x[:20]), first[:16])
    assert torch.equal(last.of(x.clone()), last.of(x))
    assert len(made) == 5
