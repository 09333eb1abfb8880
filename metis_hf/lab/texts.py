"""The beginning of a text as sequences of tokens, for what measures a model and trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metis_hf.data.chat import check_vocabulary, is_json_lines, read_tokens, refuse_objects
from metis_hf.shared.texts import utf8_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_LENGTH = 8  # tokens of a sequence
_CHARACTERS = 32  # of a token: a long text is cut before it is tokenized


def model_sequences(
    tokenizer: PreTrainedTokenizerBase,
    text: Path,
    sequences: int,
    length: int,
    *,
    config: Any,
    model: str,
    fewest: int = 1,
) -> Tensor:
    """Return the beginning of a text as a model reads it, token ids [n length].

    Args:
        tokenizer: adds no special tokens.
        text: see `read_sequences`.
        sequences: at most so many.
        length: tokens of each.
        config: the model's.
        model: its name, for messages.
        fewest: sequences that are needed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: impossible sizes, a text too short, more tokens than the model has positions,
            tokens that it does not embed; or as `read_sequences`.
    """
    if length < MIN_LENGTH or sequences < fewest:
        raise ValueError(
            f"{sequences} sequences of {length} tokens; choose at least {fewest} of {MIN_LENGTH}"
        )
    decoder = config.get_text_config(decoder=True)
    context = getattr(decoder, "max_position_embeddings", None)
    if context is not None and length > context:
        raise ValueError(
            f"{length} tokens do not fit the context of {model}, {context} tokens; choose a "
            "smaller --length"
        )
    ids, tokens = read_sequences(tokenizer, text, sequences, length)
    if len(ids) < fewest:
        raise ValueError(
            f"{text} has {tokens} tokens; at least {fewest * length} are needed, {fewest} x "
            f"{length}. Give a longer text, or a smaller --length"
        )
    check_vocabulary(ids, decoder.vocab_size, model)
    return ids


def read_sequences(
    tokenizer: PreTrainedTokenizerBase, text: Path, sequences: int, length: int
) -> tuple[Tensor, int]:
    """Return token ids [n length], n <= sequences, and how many tokens were read.

    Where n < sequences, the file has no more.

    Args:
        tokenizer: adds no special tokens.
        text: a UTF-8 file, or JSON lines, see `data.chat`; its beginning is read.
        sequences: at most so many; there are fewer, or none, where the text is short.
        length: tokens of each.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the text is not UTF-8; or as `read_tokens`.
    """
    wanted = sequences * length
    tokens: list[int] = []
    if is_json_lines(text):
        for document in read_tokens(text, tokenizer):
            tokens += document
            if len(tokens) >= wanted:
                break
    else:
        content = utf8_text(text, "utf-8-sig")
        refuse_objects(text, content)
        tokens = _first_tokens(tokenizer, content, wanted)
    count = min(sequences, len(tokens) // length)
    ids = torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)
    return ids, len(tokens)


def _first_tokens(tokenizer: PreTrainedTokenizerBase, content: str, wanted: int) -> list[int]:
    cut = _CHARACTERS * wanted
    while True:
        ids = tokenizer(content[:cut], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= wanted or cut >= len(content):
            return ids
        cut *= 2
