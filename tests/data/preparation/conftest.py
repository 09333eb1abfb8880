"""Sources, a reference model and arguments of a preparation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.preparation.sources import (
    FOREIGN,
    JUNK,
    SCORED,
    SEQ_LEN,
    VOCAB,
    contents,
    english_texts,
    write_source,
)
from metis_hf.data import PrepareArguments, prepare
from metis_hf.data.corpus import Document, train_tokenizer


@pytest.fixture(scope="session")
def raw() -> list[bytes]:
    """Real documents with others strewn in, as bytes; every file format can hold them."""
    mixed = [text.encode() for text in english_texts()]
    for i, other in enumerate([*(text.encode() for text in FOREIGN), *JUNK, b" \n\t "]):
        mixed.insert(3 + 5 * i, other)
    return mixed


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> str:
    """A tiny random Llama with a tokenizer; wide weights, so that perplexities differ."""
    path = tmp_path_factory.mktemp("reference")
    tokenizer = train_tokenizer([Document("", text) for text in english_texts()], VOCAB)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def source(tmp_path_factory, raw) -> list[str]:
    return write_source("jsonl", tmp_path_factory.mktemp("source") / "files", raw)


def arguments_of(output: Path, source: list[str], reference: str, **changes) -> PrepareArguments:
    """The arguments of a small preparation."""
    defaults = {
        "output_dir": str(output),
        "tokenizer": reference,
        "files": source,
        "seq_len": SEQ_LEN,
        "validation_share": 0.2,
        "reference_model": reference,
        "perplexity_tokens": SCORED,
        "documents_per_part": 20,
        "sequences_per_shard": 60,
    }
    return PrepareArguments(**{**defaults, **changes})


@pytest.fixture
def arguments(tmp_path, source, reference):
    """A function that gives arguments with changes."""
    return partial(arguments_of, tmp_path / "out", source, reference)


@pytest.fixture(scope="session")
def filtered(tmp_path_factory, source, reference) -> dict[str, bytes]:
    """The files that one run with all filters and a validation split writes."""
    output = tmp_path_factory.mktemp("filtered") / "out"
    prepare(arguments_of(output, source, reference))
    return contents(output)


@pytest.fixture(scope="session")
def plain(tmp_path_factory, source, reference) -> tuple[Path, dict]:
    """Output and report of one run without the perplexity filter and validation split."""
    output = tmp_path_factory.mktemp("plain") / "out"
    changes = {"validation_share": 0, "perplexity_filter": False}
    return output, prepare(arguments_of(output, source, reference, **changes))


@pytest.fixture(scope="module", autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
