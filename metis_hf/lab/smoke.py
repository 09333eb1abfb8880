"""A tiny model and texts for recipes that run with `--smoke`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from metis_hf.data.corpus import stdlib_documents, train_tokenizer


def smoke_model(directory: Path, *, write: bool = True) -> tuple[str, str]:
    """Write a tiny model with its tokenizer, and a file of texts; return the two paths.

    Without `write`, another process writes them.
    """
    path, data = directory / "smoke-model", directory / "smoke.jsonl"
    if write:
        directory.mkdir(parents=True, exist_ok=True)
        texts = stdlib_documents()[:40]
        tokenizer = train_tokenizer(texts, vocab_size=512)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, initializer_range=0.08,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        data.write_text("".join(json.dumps({"text": x.text[:2000]}) + "\n" for x in texts))
    return str(path), str(data)
