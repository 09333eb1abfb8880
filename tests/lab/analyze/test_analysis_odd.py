"""Checkpoints out of the ordinary: a converted head, layers without a spectrum or a known risk."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from conftest import VOCAB, llama, mixtral

from lab.analyze.analyzed import TEXT
from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.data.corpus import Document, train_tokenizer
from metis_hf.lab.analyze import alignment, analyze
from metis_hf.lab.analyze import spectrum_figures as figures
from metis_hf.lab.analyze.analysis import Analysis, write_csv
from metis_hf.lab.analyze.capture import Capture
from metis_hf.lab.analyze.short_names import short_names
from metis_hf.lab.analyze.stored_weights import WeightSource


def test_a_converted_head_is_analyzed_however_it_is_stored(tmp_path):
    names = {}
    for split in (False, True):
        config = MetisConfig(target_modules=["o_proj", "lm_head"], split_weight=split, rank=16)
        get_metis_model(llama(), config).save_pretrained(tmp_path / str(split))
        names[split] = WeightSource(tmp_path / str(split)).names
    assert names[True] == names[False]
    assert names[True][-1] == "lm_head"
    assert len(names[True]) == 15  # the others are analyzed though they are not converted


def test_a_picture_of_layers_without_a_spectrum():
    """Of a diverged checkpoint."""
    lines = {"model.layers.0.mlp.up_proj": {"weight": {"shape": [8, 8]}}}
    assert figures.risk_map(lines, "a model").startswith(b"\x89PNG")


def test_no_two_layers_have_one_short_name():
    for names in (
        {
            "model.layers.3.self_attn.q_proj": ("3", "q_proj"),
            "model.layers.4.mlp.up_proj": ("4", "up_proj"),
            "lm_head": ("-", "lm_head"),
        },
        {  # without "self_attn" and "mlp" these two would be one
            "h.1.self_attn.dense": ("1", "self_attn.dense"),
            "h.1.mlp.dense": ("1", "mlp.dense"),
            "h.2.mlp": ("2", "mlp"),
        },
        {
            "encoder.block.0.layer.0.q": ("encoder.block 0", "layer.0.q"),
            "decoder.block.0.layer.0.q": ("decoder.block 0", "layer.0.q"),
        },
    ):
        assert short_names(names) == names


def test_the_risk_map_has_a_cell_for_every_layer(monkeypatch):
    monkeypatch.setattr(figures, "as_png", lambda figure, title: figure)
    names = [f"encoder.layer.0.{end}" for end in ("attention.output.dense", "output.dense")]
    risks = {"nvfp4_swamped": 0.25, "metis_swamped": 0.75}
    figure = figures.risk_map({name: {"weight": risks} for name in names}, "a model")
    assert [text.get_text() for text in figure.axes[0].texts] == ["25%", "25%"]


def test_a_legend_names_the_curves_of_every_panel(monkeypatch):
    """Where layers have other ranks."""
    monkeypatch.setattr(figures, "as_png", lambda figure, title: figure)
    curve = {"sigma": [2.0, 1.0], "elbow": None}
    shared, own = "Metis: residual", [f"control: weight without its top {k}" for k in (8, 16)]
    layers = {name: {shared: curve, name: curve} for name in own}
    (legend,) = figures.residual_spectra(layers, "a model").legends
    assert [text.get_text() for text in legend.get_texts()] == [shared, *own]


def test_rows_of_experts_are_no_sequences(monkeypatch):
    """So nothing is said of how much of the subspace a sample of sequences finds."""
    monkeypatch.setattr(figures, "as_png", lambda figure, title: figure)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    found = alignment.alignment_data(x, 4, None)
    assert found.keys() == {"rank", "rows", "by_row"}
    assert found["by_row"] == alignment.alignment_data(x, 4, 10)["by_row"]
    figure = figures.alignment({"activation": {"shape": [50, 16], "alignment": found}}, "a")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["rows, of 50"]


@pytest.mark.slow
class TestConvertedExperts:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory):
        """A converted Mixtral, whose files transformers names otherwise, and what was measured."""
        place = tmp_path_factory.mktemp("mixtral")
        torch.manual_seed(0)
        (place / "text.txt").write_text(TEXT)
        model = mixtral(2, vocab_size=300, num_experts_per_tok=1)
        get_metis_model(model, MetisConfig(scheme="nvfp4-rne")).save_pretrained(place)
        train_tokenizer([Document("a", TEXT)], vocab_size=300).save_pretrained(place)
        sizes = {"sequences": 4, "length": 16, "rank": 4}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(figures, "as_png", lambda figure, title: b"")
            result = analyze(
                [place], place / "out", text=place / "text.txt", layers="experts", **sizes
            )
        return result, model, WeightSource(place)

    def test_they_are_called_as_in_the_model(self, run):
        _, model, source = run
        layers = dict(metis_layers(model))
        assert set(source.names) == layers.keys()
        for name in source.names:
            assert torch.equal(source.load(name).weight, layers[name].weight)

    def test_they_see_tokens_which_are_no_sequences(self, run):
        result, _, _ = run
        assert not [note for note in result.notes if "received no token" in note]
        rows = [line["activation"]["shape"][0] for line in result.lines.values()]
        assert 0 < min(rows) < max(rows) < 4 * 16
        portrait = next(iter(result.portraits.values()))
        assert "by_sequence" not in portrait["activation"]["alignment"]
        assert "by_row" in portrait["gradient"]["alignment"]


def test_a_decoder_without_a_head_reads_the_text_too():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2
    )
    seen = []
    hooks = Capture(set(), lambda layer, kind, x: seen.append((layer, kind, x.shape[0])))
    layers = ["encoder.block.0.layer.0.SelfAttention.q", "decoder.block.0.layer.0.SelfAttention.q"]
    hooks.run(transformers.T5Model(config).eval(), torch.arange(32).view(2, 16), layers)
    assert seen == [(layer, "activation", 32) for layer in layers]


def test_layers_of_unknown_risk_come_first_in_the_table(tmp_path):
    risks = {"a": 0.5, "b": math.nan, "c": 0.25, "d": math.nan, "e": 0.75}
    lines = {n: {"weight": {"shape": [1, 1], "nvfp4_swamped": r}} for n, r in risks.items()}
    result = Analysis("model", lines=lines)
    assert result.by_risk() == ["b", "d", "e", "a", "c"]
    write_csv(tmp_path / "layers.csv", result)
    rows = (tmp_path / "layers.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["b", "d", "e", "a", "c"]


def test_models_are_told_apart():
    """Runs of a comparison keep their weights in directories of one name."""
    for names in (
        {"/o/bf16/seed-0/model": "bf16/seed-0", "/o/metis/seed-0/model": "metis/seed-0"},
        {"a/run/seed-0/model/": "a/run/seed-0", "b/run/seed-0": "b/run/seed-0"},
        {"org/name": "org/name"},
        {"run": "run", "run/model": "run/model"},
    ):
        assert figures.short_models(names) == names
