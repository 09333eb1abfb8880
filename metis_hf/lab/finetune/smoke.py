"""A tiny model and tiny data, to try a fine-tuning in a minute."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from metis_hf.data.corpus import stdlib_documents, train_tokenizer


def smoke_model(directory: Path, documents: int = 40, *, write: bool = True) -> tuple[str, str]:
    """Write a tiny model with its tokenizer and conversations; returns the two paths.

    Args:
        directory: where they are; it is made.
        documents: conversations.
        write: False where another process has written them.
    """
    path, data = directory / "smoke-model", directory / "smoke.jsonl"
    if not write:
        return str(path), str(data)
    directory.mkdir(parents=True, exist_ok=True)
    texts = stdlib_documents()[:documents]
    tokenizer = train_tokenizer(texts, vocab_size=512)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.08,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    lines = [
        {"messages": [{"role": "user", "content": text.path},
                      {"role": "assistant", "content": text.text[:2000]}]}
        for text in texts
    ]  # fmt: skip
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path), str(data)
