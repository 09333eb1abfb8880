"""The data of a comparison on disk, so that every process reads the same tokens.

`embed` chunks a folder of text, or the standard library's sources, once. `load_data` opens this
data, or data from recipes/prepare_data.py, for a run.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from metis_hf.data.chunked import META, TOKENIZER, load_chunked, read_meta

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from metis_hf.data.corpus import Document
    from metis_hf.lab.compare.variants import Experiment

EMBEDDED_TRAIN, EMBEDDED_VALIDATION = "train", "validation"


def embed(
    directory: Path,
    *,
    vocab_size: int,
    sequence_length: int,
    tokens: int | None = None,
    held_out_tokens: int | None = None,
    text: Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Chunk text into `directory`, unless the directory exists.

    Writes `train`, `validation` (other files) and `tokenizer`. A new tokenizer is trained on the
    first file of a text folder, or on the standard library's `train`, up to 3M characters.

    Args:
        directory: parent of the three.
        vocab_size: of a new tokenizer.
        sequence_length: tokens per sequence.
        tokens, held_out_tokens: most tokens in `train` and `validation`; None takes all.
        text: a folder of .txt or .txt.xz files (`shards.text_files`); None: the sources of
            Python's standard library.
        tokenizer: the model's tokenizer; None trains a new one.

    Raises:
        FileNotFoundError, ValueError: as `shards.text_files` and `shards.read_text`.
    """
    from metis_hf.data.corpus import chunk, split_documents, stdlib_documents, train_tokenizer
    from metis_hf.data.shards import documents, text_files

    if directory.is_dir():
        return
    # Named after the process: other processes of an array may write at the same time.
    temporary = directory.with_name(f"{directory.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    train: Iterable[Document]
    held_out: Iterable[Document]
    if text is None:
        splits = split_documents(stdlib_documents())
        first = train = splits.train
        held_out = [*splits.validation, *splits.test]
    else:
        files, other = text_files(text)
        first, train, held_out = list(documents(files[:1])), documents(files), documents(other)
    if tokenizer is None:
        tokenizer = train_tokenizer(first, vocab_size, max_chars=3_000_000)
    tokenizer.save_pretrained(temporary / TOKENIZER)
    for name, each, most in (
        (EMBEDDED_TRAIN, train, tokens),
        (EMBEDDED_VALIDATION, held_out, held_out_tokens),
    ):
        chunked = chunk(each, tokenizer, sequence_length, max_tokens=most)
        chunked.select_columns(["input_ids"]).save_to_disk(temporary / name)
    try:
        temporary.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(temporary)  # another process was first


def load_data(
    data: str | Path, validation: str | Path | None, experiment: Experiment, eval_sequences: int
) -> tuple[datasets.Dataset, datasets.Dataset, PreTrainedTokenizerBase]:
    """Return (training sequences in the seed's order, held-out sequences, tokenizer).

    Args:
        data: a directory written by `embed` or recipes/prepare_data.py.
        validation: a directory of held-out tokens; None takes `data/validation`.
        experiment: provides the model, sequence length and seed.
        eval_sequences: largest number of held-out sequences; of n, every (n // eval_sequences)-th
            is taken.

    Raises:
        FileNotFoundError: no chunked tokens, or no held-out ones.
        ValueError: sequences of another length, tokens that the model does not embed, or
            `validation` together with data from `embed`.
    """
    from transformers import AutoTokenizer

    data = Path(data)
    fitting = experiment.model["vocab_size"], experiment.sequence_length
    embedded = (data / EMBEDDED_TRAIN).is_dir() and not (data / META).is_file()
    if embedded and (data / TOKENIZER).is_dir():
        if validation is not None:
            raise ValueError(
                f"validation={validation} conflicts with {data}, which a comparison made from a "
                "text with its own held-out files; leave --validation out"
            )
        train = _embedded(data / EMBEDDED_TRAIN, *fitting)
        held_out = _embedded(data / EMBEDDED_VALIDATION, *fitting)
    else:
        folder = Path(validation or data / "validation")
        train = _chunked(data, *fitting)
        if validation is None and not (folder / META).is_file():
            raise FileNotFoundError(
                f"{data} contains no held-out tokens ({folder / META} is missing); prepare it "
                "with --validation-share above 0, or give --validation DIR"
            )
        held_out = _chunked(folder, *fitting)
    tokenizer = AutoTokenizer.from_pretrained(data / TOKENIZER)
    step = max(1, len(held_out) // eval_sequences)
    held_out = held_out.select(range(0, len(held_out), step)[:eval_sequences])
    train = train.shuffle(seed=experiment.seed, keep_in_memory=True)
    return train.with_format("torch"), held_out.with_format("torch"), tokenizer


def _embedded(directory: Path, vocab_size: int, sequence_length: int) -> datasets.Dataset:
    """Open `train` or `validation` from `embed`; check sequence length and vocabulary."""
    import datasets

    found = datasets.load_from_disk(directory).with_format("numpy")
    _check_length(directory, len(found[0]["input_ids"]), sequence_length)
    largest = max(int(batch["input_ids"].max()) for batch in found.iter(1024))
    if largest >= vocab_size:
        raise ValueError(
            f"{directory} contains token id {largest}, but the model has a vocabulary of "
            f"{vocab_size}; build the model with vocab_size={largest + 1} or more"
        )
    return found


def _chunked(directory: Path, vocab_size: int, sequence_length: int) -> datasets.Dataset:
    _check_length(directory, read_meta(directory)["seq_len"], sequence_length)
    return load_chunked(directory, vocab_size=vocab_size)


def _check_length(directory: Path, length: int, sequence_length: int) -> None:
    if length != sequence_length:
        raise ValueError(
            f"{directory} contains sequences of {length} tokens, but the experiment uses "
            f"{sequence_length}; chunk again with --sequence-length {sequence_length}, or set "
            "sequence_length in --config"
        )
