"""A small model on disk for tests of the analysis."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from conftest import llama

from metis_hf.data.corpus import Document, train_tokenizer

TEXT = "\n".join(f"def f{i}(x):\n    return x * {i} + f{i // 2}(x - {i % 7})" for i in range(400))


def save_llama(folder: Path, text: Path) -> transformers.LlamaForCausalLM:
    """Save a Llama with its tokenizer, and a text."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([Document("a.py", TEXT)], vocab_size=300)
    model = llama()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text(TEXT)
    return model
