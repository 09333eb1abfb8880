"""Chunked sequences in parquet shards: format, loading and writing.

A directory holds `shard-00000.parquet`, ... with one column `input_ids`, a fixed-size list of
int32, and `meta.json`, which is written last: a directory with `meta.json` is complete.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from metis_hf.shared.records import read_json, write_atomically

if TYPE_CHECKING:
    import datasets

META = "meta.json"
ARGUMENTS = "arguments.json"
TOKENIZER = "tokenizer"  # a copy of the tokenizer
REQUIRED = ("tokenizer", "seq_len", "num_sequences", "num_tokens", "vocab_size", "eos_token_id")
_ROW_GROUP = 1024  # sequences that a streaming reader holds in memory


def load_chunked(directory: str | Path, *, vocab_size: int | None = None) -> datasets.Dataset:
    """Return the chunked sequences that `recipes/prepare_data.py` wrote.

    The first load converts the shards to datasets' Arrow cache (in `HF_DATASETS_CACHE`), which
    takes as much disk space again; later loads memory-map the cache.

    Args:
        directory: `output_dir` of the preparation, or its `validation` folder.
        vocab_size: Size of the model's embedding, to check token ids against; None: no check.

    Returns:
        A dataset in torch format with one column, `input_ids`: int64 `[seq_len]` per row.

    Raises:
        FileNotFoundError: If there is no chunked dataset, or its preparation is not finished.
        ValueError: If the files do not match `meta.json`, or the tokenizer's vocabulary is larger
            than the model's.
    """
    import datasets

    shards = _shards(Path(directory), vocab_size)
    # datasets takes paths for glob patterns.
    dataset = datasets.Dataset.from_parquet([glob.escape(str(shard)) for shard in shards])
    return dataset.with_format("torch")


def load_tokens(directory: str | Path, *, vocab_size: int | None = None) -> torch.Tensor:
    """Return chunked sequences as an int32 tensor `[n, seq_len]`, without the package datasets.

    Arguments and errors are as in `load_chunked`.
    """
    import pyarrow.parquet as pq

    directory = Path(directory)
    columns = [pq.read_table(shard).column(0) for shard in _shards(directory, vocab_size)]
    pieces = [chunk.flatten().to_numpy() for column in columns for chunk in column.chunks]
    tokens = np.concatenate([np.zeros(0, np.int32), *pieces])
    return torch.from_numpy(tokens).view(-1, read_meta(directory)["seq_len"])


def causal_batch(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate sequences to a batch; labels equal the inputs, since causal models shift them."""
    ids = torch.stack([row["input_ids"] for row in rows]).long()
    return {"input_ids": ids, "labels": ids.clone()}


def read_meta(directory: Path) -> dict[str, Any]:
    """Return `meta.json` of a chunked dataset; raises as `load_chunked` does."""
    path = directory / META
    if not path.is_file():
        if (directory / ARGUMENTS).is_file() or (directory.parent / ARGUMENTS).is_file():
            raise FileNotFoundError(
                f"{directory} has no {META}: its preparation did not finish, or wrote no sequences "
                "here; run the same prepare_data.py command again to finish it"
            )
        raise FileNotFoundError(
            f"{directory} has no {META}, so it is not a chunked dataset; create one with "
            "recipes/prepare_data.py"
        )
    try:
        meta = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; prepare the data again") from None
    missing = [key for key in REQUIRED if not isinstance(meta, dict) or key not in meta]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; expected the output of recipes/prepare_data.py"
        )
    return meta


def _shards(directory: Path, vocab_size: int | None) -> list[Path]:
    """Return the files of a chunked dataset; raises as `load_chunked` does."""
    meta = read_meta(directory)
    if vocab_size is not None and meta["vocab_size"] > vocab_size:
        raise ValueError(
            f"{directory} was tokenized with {meta['tokenizer']}, which has {meta['vocab_size']} "
            f"tokens, but the model embeds {vocab_size}; prepare the data with the model's "
            f"tokenizer, or build the model with vocab_size={meta['vocab_size']}"
        )
    shards = sorted(directory.glob("shard-*.parquet"))
    _check_shards(directory, shards, meta)
    return shards


def _check_shards(directory: Path, shards: list[Path], meta: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = pa.schema([_field(meta["seq_len"])])
    rows = 0
    for shard in shards:
        try:
            file = pq.ParquetFile(shard)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{shard} is not parquet ({error}); prepare the data again") from error
        if file.schema_arrow.remove_metadata() != wanted:
            raise ValueError(
                f"{shard} has the columns {file.schema_arrow.remove_metadata()}; expected only "
                f"input_ids, lists of {meta['seq_len']} int32 values"
            )
        rows += file.metadata.num_rows
    if rows != meta["num_sequences"]:
        raise ValueError(
            f"{directory} has {rows} sequences in {len(shards)} shards, but {META} says "
            f"{meta['num_sequences']}; copy the missing shards or prepare the data again"
        )


def write_shards(
    directory: Path,
    pieces: Callable[[int], np.ndarray],
    counts: list[int],
    seq_len: int,
    sequences_per_shard: int,
    progress: Callable[[int], Any],
) -> int:
    """Cut a stream of tokens into sequences and write the shards that do not exist yet.

    Args:
        directory: Directory of the shards.
        pieces: `pieces(i)` returns the tokens of piece i of the stream, int32 `[counts[i]]`.
        counts: Tokens per piece.
        seq_len: Tokens per sequence; an incomplete last sequence is dropped.
        sequences_per_shard: Sequences per file.
        progress: Called with the number of sequences of each finished shard.

    Returns:
        The number of sequences.
    """
    sequences = sum(counts) // seq_len
    if sequences:
        directory.mkdir(exist_ok=True)
    stream = _Stream(pieces, counts)
    for number, first in enumerate(range(0, sequences, sequences_per_shard)):
        last = min(first + sequences_per_shard, sequences)
        path = directory / f"shard-{number:05}.parquet"
        if not path.exists():
            tokens = np.concatenate(list(stream.slices(first * seq_len, last * seq_len)))
            write_atomically(path, lambda file: _write_parquet(file, tokens, seq_len))  # noqa: B023
        progress(last - first)
    return sequences


class _Stream:
    """Random access to the concatenation of pieces; the last piece read stays in memory."""

    def __init__(self, pieces: Callable[[int], np.ndarray], counts: list[int]) -> None:
        self.pieces = pieces
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        self._held: tuple[int, np.ndarray] | None = None

    def slices(self, start: int, stop: int) -> Iterator[np.ndarray]:
        for i in range(int(np.searchsorted(self.ends, start, side="right")), len(self.ends)):
            offset = int(self.starts[i])
            if offset >= stop:
                return
            if self._held is None or self._held[0] != i:
                self._held = i, self.pieces(i)
            yield self._held[1][max(start - offset, 0) : stop - offset]


def _field(seq_len: int) -> Any:
    import pyarrow as pa

    return pa.field("input_ids", pa.list_(pa.int32(), seq_len))


def _write_parquet(file: Any, tokens: np.ndarray, seq_len: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), type=_field(seq_len).type)
    table = pa.table([column], schema=pa.schema([_field(seq_len)]))
    pq.write_table(table, file, compression="zstd", row_group_size=_ROW_GROUP)
