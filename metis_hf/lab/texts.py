"""The beginning of a text as sequences of tokens, for what measures a model and trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metis_hf.data.chat import check_vocabulary, read_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_LENGTH = 8  # tokens of a sequence


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
        sequences: at most so many, and at least `fewest`.
        length: tokens of each.
        config: the model's.
        model: its name, for messages.
        fewest: sequences that are needed.

    Raises:
        FileNotFoundError, ValueError: impossible sizes, a text too short, more tokens than the
            model has positions, tokens that it does not embed; or as `read_sequences`.
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
            "smaller --sequence-length"
        )
    ids, tokens = read_sequences(tokenizer, text, sequences, length)
    if len(ids) < fewest:
        raise ValueError(
            f"{text} has {tokens} tokens; at least {fewest * length} are needed, {fewest} x "
            f"{length}. Give a longer text, or a smaller --sequence-length"
        )
    check_vocabulary(ids, decoder.vocab_size, model)
    return ids


def read_sequences(
    tokenizer: PreTrainedTokenizerBase, text: Path, sequences: int, length: int
) -> tuple[Tensor, int]:
    """Return token ids [n length], n <= sequences, and how many tokens were read.

    The beginning of a UTF-8 file, or of JSON lines (see `data.chat`), is read; where n < sequences
    it has no more. Errors as of `read_tokens`.
    """
    tokens: list[int] = []
    for document in read_tokens(text, tokenizer):
        tokens += document
        if len(tokens) >= sequences * length:
            break
    count = min(sequences, len(tokens) // length)
    ids = torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)
    return ids, len(tokens)
