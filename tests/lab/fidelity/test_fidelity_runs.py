"""Runs of `metis-hf fidelity` on models of other kinds, names and settings that are odd."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import gpt2
from rich.console import Console

from lab.fidelity.measuring import SMALL, settings
from metis_hf import MetisConfig
from metis_hf.cli.main import main
from metis_hf.lab.fidelity import fidelity_figures as figures
from metis_hf.lab.fidelity import predictions
from metis_hf.lab.fidelity.measurements import fidelity
from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity, narrow_table
from metis_hf.lab.fidelity.settings import Settings
from metis_hf.lab.fidelity.subject import ModelAndText
from metis_hf.lab.show.table import terminal_table

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_a_terminal_shows_whole_names_with_brackets():
    """They are no markup, whether or not the console reads any."""
    names = ["outlier-suppression-plus", "metis [rank 8]", "metis [/8]", r"metis \[bold]", "m \\"]
    results = [point(name, "metis", 0.1) for name in names]
    for markup in (True, False):
        console = Console(width=80, file=io.StringIO(), markup=markup)
        console.print(terminal_table(*narrow_table(results), title="of [m]"))
        shown = console.file.getvalue()
        assert all(name in shown for name in [*names, "of [m]"])
        assert max(map(len, shown.splitlines())) <= 80


def point(name, scheme, cost):
    batches = [{"exact": 4.0, "loss": loss, "kl": 0.1, "top1": 0.9} for loss in (4.1, 4.2)]
    return SchemeFidelity(name, scheme, overhead={"projection": cost}, batches=batches)


def test_the_line_of_the_picture_joins_the_ranks_alone(monkeypatch):
    """Files of configs may be called anything, so like a rank of metis too."""
    drawn = {}
    monkeypatch.setattr(
        figures,
        "scatter_figure",
        lambda points, *_, joined, **__: drawn.update(p=points, j=joined),
    )
    ranks, others = ["metis", "metis, rank 9"], ["metis-contraction", "metis-paper", "budget-4"]
    results = [point(name, "metis", 0.1) for name in (*ranks, *others)]
    figures.cost_figure([*results, point("metis", "nvidia", 0.2)], "a model", 8192)
    assert [p.name for p in drawn["p"]] == [*ranks, *others, "metis"]
    assert [p.name for p in drawn["j"]] == ranks


def saved(model, place, folder, **changes):
    """Save a model with the tokenizer of `place`, and return the settings that measure it."""
    model.save_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    tokenizer.save_pretrained(folder / "model")
    return Settings(str(folder / "model"), place / "text.txt", **SMALL | changes)


class TestOtherModels:
    def test_dropout_is_no_error(self, place, tmp_path):
        """Of a model that drops half of everything, under the scheme that quantizes nothing."""
        model = gpt2(vocab_size=300, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
        options = saved(model, place, tmp_path, schemes=("bf16",))
        (result,) = fidelity(options, tmp_path / "out")
        assert result.gradients["error"] == [0.0, 0.0]
        assert result.rise.mean == 0

    @pytest.mark.slow
    def test_storage_of_a_weight_changes_no_gradient(self, place, tmp_path):
        """A Conv1D's weight is [i o], a stored split [o i], and the exact gradient is one."""
        model = gpt2(vocab_size=300)
        for order in (("nvfp4-rne", "bf16-split"), ("bf16-split", "nvfp4-rne")):
            options = saved(model, place, tmp_path, schemes=order, alone=())
            found = {r.name: r.gradients["error"] for r in fidelity(options, tmp_path / order[0])}
            assert max(found["bf16-split"]) < 1e-5  # nothing is quantized
            assert 0.1 < min(found["nvfp4-rne"]) < 1.2

    def test_a_scheme_that_diverges_is_a_row(self, place, tmp_path, monkeypatch):
        real = predictions.predictions

        def broken(*args, **options):
            spoiled = {"loss": math.nan, "kl": math.nan}
            return [[row | spoiled for row in rows] for rows in real(*args, **options)]

        monkeypatch.setattr(predictions, "predictions", broken)
        results = fidelity(settings(place, schemes=("nvfp4",), alone=()), tmp_path)
        assert math.isnan(results[0].rise.mean)
        assert (
            "| nvfp4 | not finite | not finite | not finite | 0.0 |"
            in (tmp_path / "table.md").read_text()
        )

    def test_a_scheme_that_does_not_fit_says_why(self, place, tmp_path):
        """Rank 32 of the 32 directions of keys and values is more than half."""
        results = fidelity(settings(place, schemes=("nvfp4",), ranks=(32,), alone=()), tmp_path)
        assert results[1].note.startswith("rank=32 keeps 32 of 32 directions")
        assert "| metis, rank 32 | rank=32 keeps" in (tmp_path / "table.md").read_text()


def test_a_batch_with_few_tokens_for_a_split_is_named(place, tmp_path, monkeypatch, capsys):
    """2 x 24 tokens are 12 for each of 4 directions, and 9.6 for each of 5."""
    command = [
        "metis-hf", "fidelity", str(place / "model"), "--text", str(place / "text.txt"),
        "--schemes", "nvfp4-rne", "--ranks", "4,5", "--alone", "none", "--out", str(tmp_path),
        "--limit", "12", "--sequence-length", "24", "--batch", "2", "--device", "cpu",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None)
    printed = " ".join(capsys.readouterr().out.split())
    warned = "metis, rank 5: a batch of 48 tokens has only 9.6 tokens for each of the 5 directions"
    for text in (printed, (tmp_path / "index.html").read_text()):
        assert warned in text
        assert "Measure in batches of at least 3 sequences" in text
        assert text.count("a batch of 48 tokens") == 1
    assert re.search(r"│ nvfp4-rne │ 0\.\d{4} ± 0\.\d{4} │ [+-]\d\.\d\d ± \d\.\d\d │", printed)


def test_documents_of_json_lines(place, tmp_path):
    """Their texts are read and no JSON."""
    texts = (place / "text.txt").read_text().split("\n\n")[0]
    half = len(texts) // 2
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in (texts[:half], texts[half:])))
    subject = ModelAndText(str(place / "model"), file, **SMALL).open()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    shown = tokenizer.decode(torch.cat([subject.held_out, subject.training]).flatten())
    assert texts.startswith(shown)


def test_batches_are_whole(place):
    model, text = str(place / "model"), place / "text.txt"
    for sequences, batch, held_out, training in (
        (9, 2, 6, 2),  # one is left over: a batch of one would count as much as one of two
        (18, 8, 8, 8),
        (5, 4, 4, 1),  # no two whole batches
        (18, 10, 10, 8),  # and of the larger side no batch and a small one
        (3, 3, 2, 1),
    ):
        subject = ModelAndText(model, text, sequences, 24, batch).open()
        assert (len(subject.held_out), len(subject.training)) == (held_out, training)


def test_seeds(tmp_path):
    """A given seed holds for all; without one a file keeps its own."""
    file = tmp_path / "mine.json"
    file.write_text(MetisConfig(seed=7).to_json(), "utf-8")
    options = {"schemes": ("nvfp4",), "ranks": (8,), "configs": (file,)}
    for given, expected in ((None, [0, 0, 7]), (3, [3, 3, 3]), (0, [0, 0, 0])):
        chosen = Settings("m", Path("t"), seed=given, **options)
        assert [config.seed for _, config in chosen.candidates()] == expected
