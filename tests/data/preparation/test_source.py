"""Files as they lie about: parts without rows, names that a library takes for something else."""

from __future__ import annotations

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from metis_hf.data.filters import hash_fraction
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


@pytest.mark.parametrize("kept", [0.5, 0.99])
@pytest.mark.parametrize("kind", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_that_was_cut_short_is_named(kind, kept, tmp_path, arguments):
    lines = "".join(f'{{"text": "{hash_fraction(str(i))}"}}\n' for i in range(20_000)).encode()
    path = tmp_path / f"a.jsonl{kind}"
    with fsspec.open(f"file://{path}", "wb", compression="infer") as file:
        file.write(lines)
    assert b"".join(read(arguments(files=[str(path)]))) == lines
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(
        ValueError, match=rf"--files .*a\.jsonl{kind} is damaged or cut short \(.+\)"
    ):
        read(arguments(files=[str(path)]))
    path.write_bytes(lines)
    with pytest.raises(ValueError, match=rf"a\.jsonl{kind} is damaged or cut short \(.+\)"):
        read(arguments(files=[str(path)]))


def test_frames_of_zstandard_that_follow_each_other(tmp_path, arguments):
    path = tmp_path / "a.txt.zst"
    frames = [zstandard.ZstdCompressor().compress(text) for text in (b"one ", b"two")]
    path.write_bytes(b"".join(frames))
    assert read(arguments(files=[str(path)])) == [b"one two"]
