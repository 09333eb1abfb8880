"""Tokenizes a folder of .txt and .txt.xz files in memory, in parallel threads.

The package datasets is not needed. Files whose names begin with "val" are held out. A text may hold
several documents with `<|endoftext|>` between them.
"""

from __future__ import annotations

import itertools
import lzma
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metis_hf.data.chunked import META
from metis_hf.data.corpus import (
    END_OF_TEXT,
    Document,
    split_documents,
    stdlib_documents,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = "val"
SUFFIXES = (".txt", ".txt.xz")
_PIECE = 200_000  # characters that a thread tokenizes at a time
_LEARNED = 8_000_000  # most characters to train the tokenizer on


class Streams(NamedTuple):
    """Token ids [n], uint16, for training and held out."""

    train: np.ndarray
    held_out: np.ndarray


def text_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return (training files, held-out files) of a folder, sorted by name.

    Raises:
        FileNotFoundError: one of the two lists is empty.
    """
    files = [file for file in sorted(folder.glob("*")) if _is_text(file)]
    held_out = [file for file in files if file.name.startswith(HELD_OUT)]
    train = [file for file in files if file not in held_out]
    for found, what in ((train, "to train on"), (held_out, f"whose name begins with {HELD_OUT!r}")):
        if not found:
            raise FileNotFoundError(f"{folder} has no file {what} that ends in .txt or .txt.xz")
    return train, held_out


def _is_text(file: Path) -> bool:
    return file.name.endswith(SUFFIXES) and file.is_file()


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ValueError: the file is not UTF-8, or a compressed file is damaged.
    """
    try:
        raw = path.read_bytes()
        raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}; convert the "
            "file, or remove it from the folder"
        ) from None
    except (EOFError, lzma.LZMAError) as error:
        raise ValueError(
            f"{path} is damaged or truncated ({error}); create or copy it again"
        ) from None


def is_text_folder(path: Path) -> bool:
    """Return whether a directory holds text files and is not a chunked dataset."""
    return path.is_dir() and not (path / META).exists() and any(map(_is_text, path.glob("*")))


def documents(files: Iterable[Path]) -> Iterator[Document]:
    """Yield the documents of text files, one file at a time; raises as `read_text` does."""
    for file in files:
        for number, text in enumerate(read_text(file).split(END_OF_TEXT)):
            if text.strip():
                yield Document(f"{file.name}/{number}", text.strip("\n"))


def tokenize_folder(
    folder: Path, vocab_size: int, *, tokens: int, characters: int | None = None
) -> Streams:
    """Train a byte-level BPE tokenizer on a folder's first training file, and tokenize the folder.

    Args:
        folder: see `text_files`.
        vocab_size: of the tokenizer, at most 65,536.
        tokens: most training tokens; reading stops after these, also in the held-out files.
        characters: most characters of each file; None: all.

    Raises:
        FileNotFoundError, ValueError: as in `text_files` and `read_text`.
    """
    files = text_files(folder)
    train, held_out = ((read_text(file)[:characters] for file in part) for part in files)
    return _streams(train, held_out, vocab_size, tokens)


def tokenize_embedded(vocab_size: int, *, tokens: int) -> Streams:
    """Tokenize the sources of Python's standard library, some held out, like `tokenize_folder`."""
    splits = split_documents(stdlib_documents())
    train, held_out = ((d.text for d in part) for part in (splits.train, splits.validation))
    return _streams(train, held_out, vocab_size, tokens)


def _streams(
    train: Iterator[str], held_out: Iterator[str], vocab_size: int, tokens: int
) -> Streams:
    first = next(train)
    learned = [Document("", piece) for piece in _pieces(first.replace(END_OF_TEXT, ""))]
    tokenizer = train_tokenizer(learned, vocab_size, max_chars=_LEARNED)
    return Streams(
        _encoded(itertools.chain([first], train), tokenizer, tokens)[:tokens],
        _encoded(held_out, tokenizer, tokens),
    )


def _encoded(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, most: int) -> np.ndarray:
    """Return the tokens of texts, each with an end token; stop reading once there are `most`."""
    backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]

    def ids(piece: str) -> np.ndarray:
        (found,) = backend.encode_batch([piece], add_special_tokens=False)  # releases the GIL
        return np.asarray(found.ids, dtype=np.uint16)

    parts: list[np.ndarray] = []
    with ThreadPoolExecutor() as pool:
        for text in texts:
            whole = text.removesuffix("\n").removesuffix(END_OF_TEXT) + END_OF_TEXT
            parts += pool.map(ids, _pieces(whole))
            if sum(map(len, parts)) >= most:
                break
    return np.concatenate(parts)


def _pieces(text: str) -> Sequence[str]:
    return [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
