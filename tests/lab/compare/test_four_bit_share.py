"""eval/studies/four_bit_share.py: counts by hand, and the page is the record."""

from __future__ import annotations

import inspect
import json

import pytest

STUDY = "four_bit_share"
# SmolLM2-135M, with two of its layers.
LAYERS, WIDTH, INNER, KEYS, WORDS, CONTEXT = 2, 576, 1536, 192, 49152, 2048


@pytest.fixture
def smol(study):
    model = study.models()[0]
    model.config.num_hidden_layers = LAYERS
    return model


def test_the_pages_are_the_record(study):
    record = json.loads(study.RECORD.read_text())
    pages = [page.read_text() for page in study.PAGES]
    assert [study.with_tables(page, record) for page in pages] == pages
    assert "".join(pages).count("<!-- four bits: ") == 3


def test_multiply_adds_of_a_llama_by_hand(study, smol):
    found = study.multiply_adds(smol, "nvfp4-rne")
    linear = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * INNER)
    head, attention = WORDS * WIDTH, 2 * LAYERS * CONTEXT * WIDTH
    total = linear + head + attention  # of one token and pass; a step has three of each
    assert found["linear"] == pytest.approx(linear / total)
    assert found["head"] == pytest.approx((linear + head) / total)
    assert found["attention"] == pytest.approx((linear + attention) / total)
    assert found["all"] == pytest.approx(1)


@pytest.mark.slow
def test_bytes_of_a_llama_by_hand(study, smol):
    """Inputs in NVFP4 with factors of their own tokens, v once; only the head has a BF16 copy."""
    rank, tokens = 48, study.TOKENS
    linear = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * INNER)
    found = study.held_bytes(smol, "metis")
    inputs = (WIDTH, WIDTH, WIDTH, INNER)  # of q, k and v; of o; of gate and up; of down
    codes = sum(tokens * i + tokens * rank + rank * i for i in inputs) * 9 // 16
    scales = len(inputs) * (3 * 4 + 4 * rank)
    assert found["linear_activations"] == LAYERS * (codes + scales)
    assert found["weight_copies"] == 2 * WORDS * WIDTH
    norms = LAYERS * 2 * WIDTH + WIDTH
    assert found["weights"] == 4 * (linear + WORDS * WIDTH + norms)
    assert study.held_bytes(smol, "bf16")["weight_copies"] == 2 * (linear + WORDS * WIDTH)


@pytest.mark.slow
def test_rotations_are_no_codes_and_second_terms_are(study, smol):
    rotated, plain = (study.multiply_adds(smol, name) for name in ("nvidia", "nvfp4-rne"))
    exact = plain["exact"]
    added = (
        exact["linear"]
        * study.model_overhead(smol.config, study.MetisConfig(scheme="nvidia"), study.TOKENS).share
    )
    assert rotated["linear"] == pytest.approx(exact["linear"] / (sum(exact.values()) + added))
    parts = study.model_overhead(smol.config, study.MetisConfig(scheme="metis"), study.TOKENS).parts
    assert set(study.IN_FOUR_BITS) <= set(parts)
    codes = exact["linear"] * (1 + parts["thin_products"] + parts["corrections"])
    total = sum(exact.values()) + exact["linear"] * sum(parts.values())
    assert study.multiply_adds(smol, "metis")["linear"] == pytest.approx(codes / total)


def test_moments_of_four_bits_are_those_of_torchao(study):
    import numerics.torchao_oracle  # noqa: F401

    pytest.importorskip("torchao")  # where the oracle has looked
    from torchao.optim import AdamW4bit
    from torchao.optim.subclass_4bit import OptimState4bit

    block = inspect.signature(AdamW4bit).parameters["block_size"].default
    moment = OptimState4bit.zeros((256, 256), signed=True, block_size=block)
    held = sum(part.numel() * part.element_size() for part in (moment.codes, moment.scale))
    assert held == 256 * 256 * study.MOMENT_BYTES["4 bit"]
