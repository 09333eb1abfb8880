"""The perplexity filter against an independent computation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.preparation.sources import (
    SCORED,
    are_chunks_of,
    documents_of,
    english_texts,
    expected_texts,
)
from metis_hf.data import prepare
from metis_hf.data.perplexity import Outliers, Scorer


@pytest.fixture(scope="module")
def independent_perplexity(reference) -> Callable[[str], float]:
    """One text, no batch, no padding, float64."""
    tokenizer = AutoTokenizer.from_pretrained(reference)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64).eval()

    def perplexity(text: str) -> float:
        ids = tokenizer(text)["input_ids"][:SCORED]
        with torch.no_grad():
            logits = model(torch.tensor([[tokenizer.bos_token_id, *ids]])).logits[0, :-1]
        chosen = logits.log_softmax(-1)[range(len(ids)), ids]
        return math.exp(-float(chosen.mean()))

    return perplexity


def test_perplexity_filter_decides_as_an_independent_computation(
    tmp_path, raw, reference, arguments, independent_perplexity
):
    texts = expected_texts(raw)
    values = np.array([independent_perplexity(text) for text in texts])
    mean, std = values.mean(), values.std()
    kept = [text for text, v in zip(texts, values) if abs(v - mean) <= 2 * std]
    assert 0 < len(texts) - len(kept) < len(texts) / 4  # Chebyshev's bound for two deviations
    report = prepare(arguments(validation_share=0, documents_per_part=4))
    found = report["filters"]["perplexity"]
    rows = [raw.index(text.encode()) for text in texts if text not in kept]
    assert found["dropped"]["example_rows"] == rows[:5]
    assert max(rows[:5]) >= 4  # one beyond the first part
    assert found["mean"] == pytest.approx(mean, rel=1e-4)  # fp32 against fp64
    assert found["std"] == pytest.approx(std, rel=1e-4)
    assert found["dropped"]["documents"] == len(texts) - len(kept)
    assert found["too_high"] == (values > mean + 2 * std).sum()
    tokenizer = AutoTokenizer.from_pretrained(reference)
    assert report["train"]["documents"] == len(kept)
    assert are_chunks_of(documents_of(tmp_path / "out", tokenizer), kept)


def test_a_score_does_not_depend_on_the_rest_of_its_batch(reference, independent_perplexity):
    texts = [text[:size] for text, size in zip(english_texts(), (5, 300, 40, 120))]
    scores = Scorer(reference, SCORED, 3).score([*texts, ""], lambda n: None)
    alone = [math.log(independent_perplexity(text)) for text in texts]
    assert scores[:-1] == pytest.approx(alone, rel=1e-5)
    assert np.isnan(scores[-1])


def test_outliers_are_symmetric_and_ignore_what_has_no_score():
    values = np.array([*[10.0, 11.0, 9.0] * 10, 100.0, -80.0, np.nan])
    found = Outliers.of(values)
    assert list(np.flatnonzero(~found.keep)) == [30, 31, 32]
    assert (found.too_high, found.too_low) == (1, 1)
    assert found.std == pytest.approx(np.nanstd(values))


def test_a_special_token_spelled_out_is_scored_as_text(reference):
    """As it is trained on: the filter of texts splits it too."""
    text = "def f(x):<|endoftext|>\n    return x"
    tokenizer = AutoTokenizer.from_pretrained(reference)
    ids = tokenizer(text, split_special_tokens=True)["input_ids"][:SCORED]
    assert tokenizer.eos_token_id not in ids
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.bos_token_id, *ids]])).logits[0, :-1]
    expected = -logits.log_softmax(-1)[range(len(ids)), ids].mean().item()
    score = Scorer(reference, SCORED, 3).score([text], lambda n: None)
    assert score == pytest.approx(expected, rel=1e-5)
