"""Small trained-looking checkpoints with tokenizers, and the command line, for evaluation tests."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from paths import TESTS
from texts import documents
from typer.testing import CliRunner

from metis_hf import MetisConfig, get_metis_model
from metis_hf.cli.main import app
from metis_hf.data.corpus import train_tokenizer

DATA = TESTS / "fixtures" / "eval"
CONTEXT = 512
VOCAB = 512


def make_tokenizer():
    return train_tokenizer(documents()[:40], vocab_size=VOCAB)


def make_model(scheme: str | None = None, seed: int = 0, **options):
    """A Llama far from uniform, so that scores differ; converted if a scheme is given."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return (
        model if scheme is None else get_metis_model(model, MetisConfig(scheme=scheme, **options))
    )


def save(path: Path, scheme: str | None, tokenizer=None, seed: int = 0, **options) -> Path:
    make_model(scheme, seed, **options).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def run(*arguments):
    """Run `metis-hf eval ...` in this process; errors come back as exceptions."""
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])
