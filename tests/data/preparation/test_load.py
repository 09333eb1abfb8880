"""Reading chunked data back."""

from __future__ import annotations

import json
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from data.preparation.sources import SEQ_LEN, VOCAB, tokens_of
from metis_hf.data import load_chunked
from metis_hf.data.chunked import load_tokens


def test_load_chunked(plain, reference):
    output, report = plain
    dataset = load_chunked(output, vocab_size=VOCAB)
    assert len(dataset) == report["train"]["sequences"]
    assert dataset.column_names == ["input_ids"]
    assert dataset[0]["input_ids"].shape == (SEQ_LEN,)
    assert dataset[0]["input_ids"].dtype == torch.int64
    assert [int(i) for row in dataset for i in row["input_ids"]] == tokens_of(output)
    meta = json.loads((output / "meta.json").read_text())
    assert meta["num_tokens"] == len(dataset) * SEQ_LEN
    assert meta["vocab_size"] == len(AutoTokenizer.from_pretrained(reference))
    schema = pq.read_schema(output / "shard-00000.parquet")
    assert schema.field("input_ids").type == pa.list_(pa.int32(), SEQ_LEN)


def test_load_tokens_without_datasets(plain, monkeypatch):
    """The sequences of `load_chunked`, in their order, read from the shards alone."""
    wanted = torch.stack([row["input_ids"] for row in load_chunked(plain[0])])
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises ImportError
    tokens = load_tokens(plain[0], vocab_size=VOCAB)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens.long(), wanted)
    with pytest.raises(ValueError, match="but the model embeds 100"):
        load_tokens(plain[0], vocab_size=100)


def test_a_directory_whose_name_is_a_pattern(tmp_path, plain):
    copy = tmp_path / "run [a]*"
    shutil.copytree(plain[0], copy)
    assert len(load_chunked(copy)) == len(load_chunked(plain[0]))


def test_load_chunked_errors(tmp_path, plain):
    with pytest.raises(FileNotFoundError, match="so it is no chunked dataset"):
        load_chunked(tmp_path)
    with pytest.raises(ValueError, match=f"{VOCAB} tokens, but the model embeds 100"):
        load_chunked(plain[0], vocab_size=100)
    copy = tmp_path / "copy"
    shutil.copytree(plain[0], copy)
    (copy / "shard-00001.parquet").unlink()  # 60 of 256 sequences
    with pytest.raises(
        ValueError, match=r"has \d+ sequences in \d shards, but .*; copy the missing"
    ):
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
    with pytest.raises(
        ValueError, match=r"meta.json is not a whole JSON file .*; prepare the data again"
    ):
        load_chunked(copy)
    (copy / "meta.json").unlink()
    with pytest.raises(FileNotFoundError, match="not finished"):
        load_chunked(copy)
