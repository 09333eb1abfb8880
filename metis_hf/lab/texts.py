"""Token sequences from the start of a text, for measuring a model without training it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metis_hf.data.chat import check_vocabulary, read_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_LENGTH = 8  # tokens per sequence


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
    """Return the start of a text as token ids [n length] that the model can read.

    `fewest` <= n <= `sequences`; `model` is the model's name, for messages.

    Raises:
        FileNotFoundError, ValueError: impossible sizes, a text that is too short, sequences longer
            than the model's context, tokens that the model does not embed; or as `read_sequences`.
    """
    if length < MIN_LENGTH or sequences < fewest:
        raise ValueError(
            f"{sequences} sequences of {length} tokens are too few; choose at least {fewest} "
            f"sequences of {MIN_LENGTH} tokens"
        )
    decoder = config.get_text_config(decoder=True)
    context = getattr(decoder, "max_position_embeddings", None)
    if context is not None and length > context:
        raise ValueError(
            f"sequences of {length} tokens do not fit in the context of {model}, {context} "
            "tokens; choose a smaller --sequence-length"
        )
    ids, tokens = read_sequences(tokenizer, text, sequences, length)
    if len(ids) < fewest:
        raise ValueError(
            f"{text} has {tokens} tokens, but at least {fewest * length} ({fewest} x {length}) "
            "are needed. Give a longer text, or a smaller --sequence-length"
        )
    check_vocabulary(ids, decoder.vocab_size, model)
    return ids


def read_sequences(
    tokenizer: PreTrainedTokenizerBase, text: Path, sequences: int, length: int
) -> tuple[Tensor, int]:
    """Return token ids [n length], n <= sequences, and the number of tokens that were read.

    Reads the start of a UTF-8 file or of JSON lines (see `data.chat`); n < sequences only if the
    file is too short. Raises as `read_tokens`.
    """
    tokens: list[int] = []
    for document in read_tokens(text, tokenizer):
        tokens += document
        if len(tokens) >= sequences * length:
            break
    count = min(sequences, len(tokens) // length)
    ids = torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)
    return ids, len(tokens)
