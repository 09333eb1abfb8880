"""Documents of local files: names that are read as they are, files that are refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from metis_hf.data.documents import open_files


def read(*paths: Path, column: str = "text") -> list[bytes]:
    stream, _ = open_files([str(path) for path in paths], column)
    return [text for table in stream.iter(2) for text in table.column(0).to_pylist()]


@pytest.mark.parametrize("name", ["a[1]", "a::b"])
def test_names_are_neither_patterns_nor_urls(name, tmp_path):
    """Parts without rows, as Spark writes them, are passed over."""
    (tmp_path / f"{name}.jsonl").write_text('{"text": 1}')
    assert read(tmp_path / f"{name}.jsonl") == [b'{"text": 1}']
    if "::" not in name:  # which datasets takes for a URL, and names in its error
        pq.write_table(pa.table({"text": ["text"]}), tmp_path / f"{name}.parquet")
        pq.write_table(pa.table({"text": ["another"]}), tmp_path / "a1.parquet")
        assert read(tmp_path / f"{name}.parquet") == ["text"]


def test_files_that_are_damaged_or_mixed(tmp_path):
    def given(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    table = pa.table({"id": [1], "text": pa.array([], pa.string()).take(pa.array([None], "int64"))})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    line = b'{"text": "' + b"text" * 999 + b'"}\n'
    lines = given("a.jsonl", line)
    for paths, column, message in (
        ([lines, given("a.txt", b"text")], "text", "mixes file types"),
        ([given("b.jsonl", b"plain text\n")], "text", "its first line is 'plain text'"),
        ([tmp_path / "a.parquet"], "id", "column 'id' holds int64, not text"),
        ([tmp_path / "empty.parquet"], "text", "no file has rows"),
        ([given("cut.parquet", whole[:-1])], "text", "cut.parquet is not parquet"),
        ([given("cut.jsonl.zst", zstandard.compress(line)[:-3])], "text", "damaged or truncated"),
        ([given("cut.jsonl.gz", gzip.compress(line)[:-9])], "text", "damaged or truncated"),
    ):
        with pytest.raises(ValueError, match=message):
            read(*paths, column=column)
