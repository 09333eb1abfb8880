"""A small model with its tokenizer and a text, for tests of fidelity."""

from __future__ import annotations

import pytest
import torch
from conftest import llama

from lab.fidelity.measuring import settings
from lab.show.undrawn import undrawn
from metis_hf.data.corpus import Document, train_tokenizer
from metis_hf.lab.fidelity.measurements import fidelity

TEXT = "\n".join(f"def f{i}(x):\n    return x * {i} + f{i // 2}(x - {i % 7})" for i in range(400))


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A directory with a model, its tokenizer and a text."""
    folder = tmp_path_factory.mktemp("fidelity")
    tokenizer = train_tokenizer([Document("a", TEXT)], 300)
    torch.manual_seed(0)
    model = llama(1, vocab_size=300, max_position_embeddings=64)
    for parameter in model.parameters():  # predictions that differ from token to token
        parameter.data.mul_(2.0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def measured(place, tmp_path_factory):
    """(directory, results) of a measurement whose pictures are not drawn.

    Tests that need it are in one file: each process that runs tests would make its own.
    """
    out = tmp_path_factory.mktemp("out")
    chosen = ("nvfp4-rne", "metis", "metis-paper")
    with undrawn():
        return out, fidelity(settings(place, schemes=chosen, ranks=(8,)), out)
