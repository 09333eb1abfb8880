"""Documents of local files and of hub datasets as resumable streams of bytes.

They are bytes, not text, so that the reader can drop and count invalid text instead of failing.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

_KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "txt", ".parquet": "parquet"}


def open_files(
    patterns: Sequence[str], text_column: str
) -> tuple[datasets.IterableDataset, str | None]:
    """Open local files at their beginning, as a stream of Arrow tables with one column.

    Args:
        patterns: paths and glob patterns of .jsonl, .txt (also compressed) or .parquet files.
        text_column: column or key of the text; not used for .txt.

    Returns:
        (stream, key of the text if each document is a JSON line, else None).

    Raises:
        FileNotFoundError: a path does not exist or a pattern matches nothing.
        ValueError: unknown or mixed file types, damaged files, or no such text column.
    """
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = local_files(patterns)
    kind = _kind(paths[0])
    if kind == "parquet":
        filled = []  # datasets cannot read files without rows
        for path in paths:
            try:
                filled += [glob.escape(path)] if pq.read_metadata(path).num_rows else []
            except pa.ArrowInvalid as error:
                raise ValueError(f"--files {path} is not parquet ({error})") from None
        if not filled:
            raise ValueError(
                f"--files {' '.join(paths)}: no file has rows; pass files with documents"
            )
        stream = datasets.load_dataset("parquet", data_files=filled, split="train", streaming=True)
        return text_of(stream, text_column, paths[0]), None
    by_line = kind == "jsonl"
    first = next(_read(paths[:1], by_line), None)
    if by_line and first is not None:
        _check_first_line(first["document"], text_column, paths[0])
    stream = datasets.IterableDataset.from_generator(
        _read,
        features=datasets.Features({"document": datasets.Value("large_binary")}),
        gen_kwargs={"paths": paths, "by_line": by_line},
    )
    return stream.with_format("arrow"), text_column if by_line else None


def text_of(stream: datasets.IterableDataset, column: str, where: str) -> datasets.IterableDataset:
    """Return one column of a streamed dataset, as Arrow tables.

    Raises:
        ValueError: there are no rows, or no such column, or the column does not hold text.
    """
    import pyarrow as pa

    first = next(iter(stream.with_format("arrow").iter(batch_size=1)), None)
    if first is None:
        raise ValueError(f"{where} has no rows")
    _check_column(column, first.column_names, where)
    kind = first.schema.field(column).type
    if kind not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        raise ValueError(f"column {column!r} holds {kind}, not text")
    # Other columns may differ between files, which would raise an error.
    return stream.select_columns([column]).with_format("arrow")


def local_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that match paths and glob patterns, without duplicates; see `open_files`."""
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            raise FileNotFoundError(
                f"--files {pattern}: no such file; pass paths of files, or a glob pattern such as "
                f"'{pattern.rstrip('/')}/*.jsonl'"
            )
        paths += [path for path in found if path not in paths]
    kinds = {_kind(path): path for path in reversed(paths)}
    if len(kinds) > 1:
        raise ValueError(
            f"--files mixes file types ({' and '.join(kinds.values())}); prepare each type "
            "separately, or convert one"
        )
    return paths


def _kind(path: str) -> str:
    packed = Path(path).suffix in _OPENERS
    kind = _KINDS.get(Path(path).with_suffix("").suffix if packed else Path(path).suffix)
    if kind is None or (kind == "parquet" and packed):
        raise ValueError(
            f"--files {path}: cannot tell how to read it; names must end in .jsonl or .txt "
            f"(optionally with {', '.join(_OPENERS)}) or in .parquet"
        )
    return kind


def _open_zst(path: str, mode: str) -> io.BufferedReader:
    import pyarrow as pa

    # zstandard's own reader does not detect truncated files.
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path), "zstd"))


_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".zst": _open_zst,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}


def _read(paths: list[str], by_line: bool) -> Iterator[dict[str, bytes]]:
    """Yield each line that is not blank, or each whole file."""
    for path in paths:
        try:
            with _OPENERS.get(Path(path).suffix, open)(path, "rb") as file:
                if by_line:
                    yield from ({"document": line} for line in file if line.strip())
                else:
                    yield {"document": file.read().replace(b"\r\n", b"\n")}
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            if getattr(error, "errno", None) is not None:
                raise  # an I/O error, which names the file
            raise ValueError(
                f"--files {path} is damaged or truncated ({error}); create or copy it again"
            ) from None


def _check_first_line(line: bytes, column: str, path: str) -> None:
    text = line.removeprefix(codecs.BOM_UTF8).decode(errors="replace").rstrip()
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError(
            f"{path} is not JSON lines: its first line is {text[:60]!r}; expected one object per "
            f'line, such as {{"{column}": "..."}}'
        )
    _check_column(column, list(row), path)


def _check_column(column: str, columns: list[str], where: str) -> None:
    if column not in columns:
        raise ValueError(
            f"{where} has no column {column!r}; its columns are: {', '.join(columns[:20])}. Set "
            "--text-column to the one with the text"
        )
