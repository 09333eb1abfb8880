"""Small trained-looking checkpoints with tokenizers, and the command line, for evaluation tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from conftest import llama
from paths import TESTS
from texts import documents
from typer.testing import CliRunner

from metis_hf import MetisConfig, get_metis_model
from metis_hf.cli.main import app
from metis_hf.data.corpus import train_tokenizer
from metis_hf.lab.evaluate.table import row_name

DATA = TESTS / "fixtures" / "eval"
CONTEXT = 512
VOCAB = 512


def make_tokenizer():
    return train_tokenizer(documents()[:40], vocab_size=VOCAB)


def make_model(scheme: str | None = None, seed: int = 0, **options):
    """A Llama far from uniform, so that scores differ; converted if a scheme is given."""
    torch.manual_seed(seed)
    model = llama(
        1, vocab_size=VOCAB, num_attention_heads=2, max_position_embeddings=CONTEXT,
        initializer_range=0.2, bos_token_id=0, eos_token_id=0,
    ).eval()  # fmt: skip
    return (
        model if scheme is None else get_metis_model(model, MetisConfig(scheme=scheme, **options))
    )


def save(path: Path, scheme: str | None, tokenizer=None, seed: int = 0, **options) -> Path:
    make_model(scheme, seed, **options).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


@torch.no_grad()
def scored(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum of log-probabilities of tokens behind a context, and whether each is the likeliest."""
    ids = torch.tensor([context + continuation])
    logits = model.eval()(ids).logits[0, len(context) - 1 : -1].double()  # [continuation vocab]
    target = torch.tensor(continuation)
    total = logits.log_softmax(-1).gather(1, target[:, None]).sum().item()
    return total, bool((logits.argmax(-1) == target).all())


def run(*arguments):
    """Run `metis-hf eval ...` in this process; errors come back as exceptions."""
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def results(out: Path) -> dict[str, dict[str, dict]]:
    """Return row -> task -> what its result file holds."""
    found: dict[str, dict[str, dict]] = {}
    for path in sorted((out / "results").rglob("results_*.json")):
        record = json.loads(path.read_text())
        ours = record["metis"]
        row = row_name(ours["label"], ours["scheme"], ours["precision"],
                       converted=ours["settings"]["conversion"] is not None)  # fmt: skip
        found.setdefault(row, {})[ours["settings"]["task"]] = record
    return found
