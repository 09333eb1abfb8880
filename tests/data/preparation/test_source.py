"""Files as they lie about: parts without rows, names that a library takes for something else."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metis_hf.data.source import open_source


def write(path, texts):
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)
    return str(path)


def read(arguments):
    return [text for batch in open_source(arguments).batches(2) for text in batch]


@pytest.mark.parametrize("empty", [[0], [1], [0, 1, 3]])
def test_parquet_parts_without_rows_are_passed_over(empty, tmp_path, arguments):
    """As Spark writes them, first or in the middle."""
    texts = [[] if i in empty else [f"{i}", f"{i}b"] for i in range(4)]
    files = [write(tmp_path / f"{i}.parquet", rows) for i, rows in enumerate(texts)]
    assert read(arguments(files=files)) == [text.encode() for rows in texts for text in rows]


@pytest.mark.parametrize("name", ["a[1]", "a*?", "a::b"])
def test_names_are_neither_patterns_nor_urls(name, tmp_path, arguments):
    write(tmp_path / "a1.parquet", ["another"])
    if "::" not in name:  # which datasets takes for a URL, and names in its error
        assert read(arguments(files=[write(tmp_path / f"{name}.parquet", ["text"])])) == [b"text"]
    (tmp_path / f"{name}.jsonl").write_text('{"text": 1}')
    assert read(arguments(files=[str(tmp_path / f"{name}.jsonl")])) == [b'{"text": 1}']
