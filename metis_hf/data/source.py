"""Where documents come from: a hub dataset or local files, as a stream that can be resumed.

Every source becomes an `Opened`: a `datasets.IterableDataset` and how to get raw bytes out of it.
Bytes, not text, so that what cannot be decoded is dropped and counted instead of ending the run.
"""

from __future__ import annotations

import codecs
import glob
import importlib.util
import io
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis_hf.data.arguments import PrepareArguments

if TYPE_CHECKING:
    import datasets

COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "txt", ".parquet": "parquet"}


@dataclass
class Opened:
    """A stream of documents.

    Attributes:
        dataset: Yields rows with the raw document, or tables if `is_table`.
        column: Column of `dataset` with the raw document.
        json_column: Key of the text if the raw document is a line of JSON, else None.
        is_table: Whether `dataset` yields Arrow tables.
    """

    dataset: datasets.IterableDataset
    column: str
    json_column: str | None
    is_table: bool

    def batches(self, size: int) -> Iterator[list[bytes | None]]:
        """Yield raw documents, `size` at a time; `dataset.state_dict()` then is where to go on."""
        import pyarrow as pa

        for batch in self.dataset.iter(batch_size=size):
            if self.is_table:
                yield batch.column(self.column).cast(pa.large_binary()).to_pylist()
            else:
                yield batch[self.column]


def local_files(patterns: list[str]) -> list[str]:
    """Return the files that paths and glob patterns name, once; a pattern's files are sorted.

    Raises:
        FileNotFoundError: If a path does not exist or a pattern matches nothing.
        ValueError: If a name's ending is unknown or the kinds differ.
    """
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            raise FileNotFoundError(
                f"--files {pattern}: no such file; give paths of files, or a glob pattern such as "
                f"'{pattern.rstrip('/')}/*.jsonl'"
            )
        paths += [path for path in found if path not in paths]
    kinds = {path: _kind(path) for path in paths}
    if len(set(kinds.values())) > 1:
        one, other = (next(p for p in paths if kinds[p] == k) for k in sorted(set(kinds.values())))
        raise ValueError(
            f"--files mixes kinds ({one} and {other}); prepare each kind on its own, or convert one"
        )
    return paths


def open_source(arguments: PrepareArguments) -> Opened:
    """Open the source that the arguments name, at its beginning.

    Raises:
        FileNotFoundError, ValueError: As `local_files`; or if the text column does not exist or is
            not text, or there is no document at all.
        ImportError: If `.zst` files need a library that is not installed.
    """
    if arguments.files is None:
        return _open_table(
            arguments.text_column,
            arguments.dataset,
            name=arguments.dataset_config,
            split=arguments.dataset_split,
        )
    paths = local_files(arguments.files)
    kind = _kind(paths[0])
    if kind == "parquet":
        return _open_table(
            arguments.text_column, "parquet", data_files={"train": _with_rows(paths)}, split="train"
        )
    if any(path.endswith(".zst") for path in paths) and not importlib.util.find_spec("zstandard"):
        raise ImportError(
            "reading .zst files needs zstandard; install it with `pip install 'metis-hf[data]'`"
        )
    return _open_bytes(arguments.text_column, paths, by_line=kind == "jsonl")


def _kind(path: str) -> str:
    name = Path(path)
    ending = name.with_suffix("").suffix if name.suffix in COMPRESSED else name.suffix
    kind = KINDS.get(ending)
    if kind is None or (kind == "parquet" and name.suffix in COMPRESSED):
        raise ValueError(
            f"--files {path}: cannot tell how to read it; names must end in .jsonl or .txt "
            f"(optionally with {', '.join(COMPRESSED)}) or in .parquet"
        )
    return kind


def _with_rows(paths: list[str]) -> list[str]:
    """Return patterns that match the parquet files with rows: datasets reads none without."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = []
    for path in paths:
        try:
            rows = pq.read_metadata(path).num_rows
        except pa.ArrowInvalid as error:
            raise ValueError(f"--files {path} is not parquet ({error})") from None
        if rows:
            found.append(glob.escape(path))
    if not found:
        raise ValueError(f"--files {' '.join(paths)}: no file has rows; give files with documents")
    return found


def _open_table(text_column: str, *args: Any, **kwargs: Any) -> Opened:
    """Return a dataset that is read as Arrow tables: parquet files, or anything on the hub."""
    import datasets
    import pyarrow as pa

    dataset = datasets.load_dataset(*args, streaming=True, **kwargs)
    first = next(iter(dataset.with_format("arrow").iter(batch_size=1)), None)
    if first is None:
        raise ValueError(f"{kwargs.get('data_files', args[0])} has no rows")
    _check_column(text_column, first.column_names, str(args[0]))
    kind = first.schema.field(text_column).type
    text_types = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    if kind not in text_types:
        raise ValueError(f"column {text_column!r} holds {kind}, not text")
    # Other columns may differ from file to file, which would end the run.
    dataset = dataset.select_columns([text_column]).with_format("arrow")
    return Opened(dataset, text_column, None, is_table=True)


def _open_bytes(text_column: str, paths: list[str], by_line: bool) -> Opened:
    """Return lines or whole files, as bytes: datasets' own readers stop at what is not UTF-8."""
    import datasets

    first = next(iter(_read([paths[0]], by_line)), None)
    if by_line and first is not None:
        _check_first_line(text_column, first["document"], paths[0])
    dataset = datasets.IterableDataset.from_generator(
        _read,
        features=datasets.Features({"document": datasets.Value("large_binary")}),
        gen_kwargs={"paths": paths, "by_line": by_line},
    )
    return Opened(dataset, "document", text_column if by_line else None, is_table=False)


def _read(paths: list[str], by_line: bool) -> Iterator[dict[str, bytes]]:
    for path in paths:
        try:
            yield from _documents(path, by_line)
        except _damage_of(path) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk; it names the file
            raise ValueError(
                f"--files {path} is damaged or cut short ({error}); make or copy it again"
            ) from None


def _damage_of(path: str) -> tuple[type[Exception], ...]:
    """Return what decompressors raise, none of which names the file."""
    found = (EOFError, OSError, lzma.LZMAError, zlib.error)
    if not path.endswith(".zst"):
        return found
    import zstandard

    return (*found, zstandard.ZstdError)


def _documents(path: str, by_line: bool) -> Iterator[dict[str, bytes]]:
    from fsspec.implementations.local import LocalFileSystem

    local = LocalFileSystem()  # `fsspec.open` would read a URL out of a path with "::"
    zst = path.endswith(".zst")
    with local.open(path, "rb", compression=None if zst else "infer") as opened:
        file = io.BufferedReader(_Zst(opened)) if zst else opened
        if by_line:
            # A blank line, such as one at the end of a file, is no document.
            yield from ({"document": line} for line in file if line.strip())
        else:
            yield {"document": file.read().replace(b"\r\n", b"\n")}


class _Zst(io.RawIOBase):
    """A .zst file, unpacked; zstandard's own reader takes one that was cut short for whole."""

    def __init__(self, file: Any) -> None:
        import zstandard

        self.new_frame = zstandard.ZstdDecompressor().decompressobj
        self.file, self.frame, self.held = file, self.new_frame(), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.held:
            packed = self.frame.unused_data if self.frame.eof else b""
            packed = packed or self.file.read(io.DEFAULT_BUFFER_SIZE)
            if not packed and not self.frame.eof:
                raise EOFError("it ended inside a frame")
            if not packed:
                return 0
            if self.frame.eof:
                self.frame = self.new_frame()
            self.held = memoryview(self.frame.decompress(packed))
        count = min(len(buffer), len(self.held))
        buffer[:count] = self.held[:count]
        self.held = self.held[count:]
        return count


def _check_first_line(text_column: str, line: bytes, path: str) -> None:
    try:
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace"))
    except ValueError:
        row = None
    if not isinstance(row, dict):
        start = line[:60].decode("utf-8", errors="replace").rstrip()
        raise ValueError(
            f"{path} is not JSON lines: its first line is {start!r}, expected one object per line, "
            f'such as {{"{text_column}": "..."}}'
        )
    _check_column(text_column, list(row), path)


def _check_column(text_column: str, columns: list[str], where: str) -> None:
    if text_column not in columns:
        shown = ", ".join(itertools.islice(columns, 20))
        raise ValueError(
            f"{where} has no column {text_column!r}; its columns are: {shown}. Name the one with "
            "the text with --text-column"
        )
