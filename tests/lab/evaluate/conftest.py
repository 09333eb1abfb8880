"""Checkpoints that tests of the command line share."""

from __future__ import annotations

import pytest

from lab.evaluate.eval_tools import make_tokenizer, save


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer):
    """Two runs: the control, and the same model under Metis."""
    folder = tmp_path_factory.mktemp("runs")
    for scheme in ("bf16", "metis"):
        save(folder / scheme / "model", scheme, tokenizer)
    return folder
