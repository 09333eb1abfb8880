"""Chunked tokens as recipes/prepare_data.py writes them, of tokens that a test chooses."""

from __future__ import annotations

import json

import numpy as np

from metis_hf.data.chunked import write_shards


def write_chunked(folder, pieces, length, vocab, per_shard=512, **changes):
    """Write tokens, int32 arrays that follow each other, as sequences; returns the directory.

    Changes are fields of meta.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [np.asarray(piece, np.int32) for piece in pieces]
    counts = [len(piece) for piece in pieces]
    rows = write_shards(folder, pieces.__getitem__, counts, length, per_shard, lambda _: None)
    meta = {
        "tokenizer": "t", "seq_len": length, "num_sequences": rows, "num_tokens": rows * length,
        "vocab_size": vocab, "eos_token_id": 0, **changes,
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder
