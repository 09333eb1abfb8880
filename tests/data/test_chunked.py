"""Chunked tokens: written, read back, and refused where they are not what meta.json says."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.chunks import write_chunked
from metis_hf.data.chunked import load_chunked, load_tokens

VOCAB, SEQ_LEN, ROWS = 400, 64, 130


@pytest.fixture(scope="module")
def stream():
    return np.random.default_rng(0).integers(0, VOCAB, ROWS * SEQ_LEN + 7, dtype=np.int32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, stream):
    """Two shards, of a stream that comes in three pieces."""
    path = tmp_path_factory.mktemp("chunked") / "run [a]*"  # a name that is a pattern, too
    write_chunked(path, np.split(stream, [100, 5000]), SEQ_LEN, VOCAB, 70)
    (path / "arguments.json").write_text("{}")
    return path


def test_what_was_written_is_read(directory, stream, monkeypatch):
    dataset = load_chunked(directory, vocab_size=VOCAB)
    assert dataset.column_names == ["input_ids"]
    assert dataset[0]["input_ids"].dtype == torch.int64
    rows = torch.stack([row["input_ids"] for row in dataset])
    assert rows.tolist() == stream[: ROWS * SEQ_LEN].reshape(ROWS, SEQ_LEN).tolist()
    schema = pq.read_schema(directory / "shard-00001.parquet")
    assert schema.field("input_ids").type == pa.list_(pa.int32(), SEQ_LEN)
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises ImportError
    tokens = load_tokens(directory, vocab_size=VOCAB)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens.long(), rows)


def test_errors(tmp_path, directory):
    with pytest.raises(FileNotFoundError, match="so it is not a chunked dataset"):
        load_chunked(tmp_path)
    for load in (load_chunked, load_tokens):
        with pytest.raises(ValueError, match=f"{VOCAB} tokens, but the model embeds 100"):
            load(directory, vocab_size=100)
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / "shard-00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"has 70 sequences in 1 shards, but .*; copy the missing"):
        load_chunked(copy)
    pq.write_table(pa.table({"input_ids": [[1, 2]]}), copy / "shard-00001.parquet")
    with pytest.raises(ValueError, match="expected only input_ids, lists of 64"):
        load_chunked(copy)
    (copy / "shard-00001.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="is not parquet"):
        load_chunked(copy)
    (copy / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks tokenizer, seq_len"):
        load_chunked(copy)
    (copy / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not a valid JSON file .*; prepare the data again"):
        load_chunked(copy)
    (copy / "meta.json").unlink()
    with pytest.raises(FileNotFoundError, match="did not finish"):
        load_chunked(copy)
