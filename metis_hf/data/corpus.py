"""A training corpus that every Python installation already has: its standard library.

Finds the documents, splits them by path, so that the split is the same on every machine, trains a
byte-level BPE tokenizer, and cuts token ids into equal sequences. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import string
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
MIN_CHARACTERS = 200  # shorter files are empty package markers or stubs
TABLE_CHARACTERS = 4000  # shorter files cannot hold a large table
TABLE_FRACTION = 0.6  # codec maps, entity and topic tables: 0.7 to 1.0; code: below 0.55
BYTE_ALPHABET = 256
VALIDATION_SHARE, TEST_SHARE = 0.02, 0.04  # of paths

_EXCLUDED_PARTS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_EXCLUDED_PREFIXES = ("lib2to3/tests/data/",)
_NOT_LETTERS = dict.fromkeys(map(ord, string.digits + string.punctuation))
_ENCODE_BATCH = 64  # documents per tokenizer call: enough to parallelize, few past `max_tokens`


@dataclass(frozen=True)
class Document:
    """A text and its path, which determines the split.

    Attributes:
        path: Posix path relative to the corpus root, e.g. `"json/decoder.py"`.
        text: The whole file, newlines as `"\\n"`.
    """

    path: str
    text: str


class Splits(NamedTuple):
    """Three disjoint lists of documents, each in the fixed order of `stdlib_documents`."""

    train: list[Document]
    validation: list[Document]
    test: list[Document]


def stdlib_documents() -> list[Document]:
    """Return the source files of the interpreter's standard library, except stubs and tables.

    Returns:
        Documents sorted by the sha256 of their path, a reproducible shuffle. Some distributions
        ship without the `test` package; the corpus is then less than half as large.

    Raises:
        ValueError: If the standard library has no source files (a zipped or frozen interpreter).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in root.rglob("*.py"):
        path = file.relative_to(root).as_posix()
        if _EXCLUDED_PARTS & set(path.split("/")) or path.startswith(_EXCLUDED_PREFIXES):
            continue
        try:
            text = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):  # test data, unreadable or badly encoded on purpose
            continue
        if len(text) >= MIN_CHARACTERS and not _is_table(text):
            documents.append(Document(path, text))
    if not documents:
        raise ValueError(
            f"the standard library in {root} has no usable *.py file; use an interpreter that is "
            "installed with its sources"
        )
    return sorted(documents, key=_order)


def split_documents(documents: Iterable[Document]) -> Splits:
    """Assign every document to a split by the hash of its path.

    The split of a file does not depend on the machine, on other files or on the order of the
    documents. Of documents that are equal up to whitespace, digits and punctuation only one is
    kept, so that no held-out text appears in `train` (codec wrappers, for example, differ only in a
    number).
    """
    splits = Splits([], [], [])
    seen: set[bytes] = set()
    for document in sorted(documents, key=_order):
        letters = "".join(document.text.translate(_NOT_LETTERS).split())
        key = hashlib.sha256(letters.encode()).digest()
        if key in seen:
            continue
        seen.add(key)
        position = _path_fraction(document.path)
        if position < TEST_SHARE:
            splits.test.append(document)
        elif position < TEST_SHARE + VALIDATION_SHARE:
            splits.validation.append(document)
        else:
            splits.train.append(document)
    return splits


def train_tokenizer(
    documents: Sequence[Document], vocab_size: int, *, max_chars: int = 4_000_000
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; the same documents give the same tokenizer.

    `<|endoftext|>` (id 0) is the beginning, end and padding token. There is no unknown token, since
    all 256 bytes are in the vocabulary, and `encode` adds no special token.

    Args:
        documents: Training texts, read in order until `max_chars` characters.
        vocab_size: Number of tokens, specials and bytes included. A very small corpus gives fewer.
        max_chars: Characters to learn merges from.

    Raises:
        ValueError: If there is no text, or `vocab_size` is below 257 (256 bytes and the special
            token).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size <= BYTE_ALPHABET:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: the {BYTE_ALPHABET} bytes and {END_OF_TEXT} "
            f"need {BYTE_ALPHABET + 1} tokens; choose at least that"
        )
    if not any(document.text for document in documents):
        raise ValueError(f"no text in {len(documents)} documents; pass at least one with text")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(documents, max_chars), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,  # decode(encode(text)) must be text
    )


def chunk(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    *,
    max_tokens: int | None = None,
) -> datasets.Dataset:
    """Join documents with the end-of-text token and cut the stream into equal sequences.

    Args:
        documents: Texts, tokenized in order; each is followed by `tokenizer.eos_token_id`.
        tokenizer: Any Hugging Face tokenizer with an end-of-text token.
        sequence_length: Tokens per row.
        max_tokens: Stop after this many tokens; `None` takes everything.

    Returns:
        An in-memory dataset in torch format. Its columns `input_ids` and `labels` are equal (causal
        models shift the labels themselves) and int64 `[sequence_length]` per row. The tail that
        does not fill a row is dropped.

    Raises:
        ValueError: If the tokenizer has no end-of-text token or the tokens do not fill one row.
    """
    import datasets
    import numpy as np
    import pyarrow as pa

    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length}; choose at least 1")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token to put between documents; set one")
    pieces: list[np.ndarray] = []
    total = 0
    left = iter(documents)
    while batch := list(islice(left, _ENCODE_BATCH)):
        encoded = tokenizer(
            [document.text for document in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        for ids in encoded:
            pieces.append(np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int32))
            total += len(pieces[-1])
        if max_tokens is not None and total >= max_tokens:
            break
    available = total if max_tokens is None else min(total, max_tokens)
    rows = available // sequence_length
    if rows == 0:
        raise ValueError(
            f"sequence_length={sequence_length} exceeds the number of tokens, {available} "
            f"({total} in {len(pieces)} documents, max_tokens={max_tokens}); pass more text, raise "
            "max_tokens or shorten the sequences"
        )
    stream = np.concatenate(pieces)[: rows * sequence_length]
    column = pa.FixedSizeListArray.from_arrays(pa.array(stream), sequence_length)
    dataset = datasets.Dataset(pa.table({"input_ids": column, "labels": column}))
    return dataset.with_format("torch")


def _order(document: Document) -> str:
    return hashlib.sha256(document.path.encode()).hexdigest()


def _path_fraction(path: str) -> float:
    """Return a hash of the path in [0, 1), independent of the order of `stdlib_documents`."""
    digest = hashlib.sha256(f"split:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _is_table(text: str) -> bool:
    """Return whether most lines are literals, as in generated tables."""
    if len(text) < TABLE_CHARACTERS:
        return False
    lines = [line.lstrip() for line in text.splitlines() if line.strip()]
    literals = sum(
        line[0] in "'\"([{+-0123456789" or line.startswith(("b'", 'b"', "u'", "r'"))
        for line in lines
    )
    return literals / len(lines) > TABLE_FRACTION


def _first_characters(documents: Iterable[Document], count: int) -> Iterator[str]:
    for document in documents:
        if count <= 0:
            return
        yield document.text[:count]
        count -= len(document.text)
