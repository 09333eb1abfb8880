"""The beginning of a text as sequences of tokens, for what measures a model and trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metis_hf.shared.texts import utf8_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS = 32  # of a token, at most: a long text is cut before it is tokenized


def read_sequences(
    tokenizer: PreTrainedTokenizerBase, text: Path, sequences: int, length: int
) -> tuple[Tensor, int]:
    """Return token ids [n length], n <= sequences, and how many tokens there were.

    Args:
        tokenizer: adds no special tokens.
        text: a UTF-8 file; its beginning is read.
        sequences: at most so many; there are fewer, or none, where the text is short.
        length: tokens of each.

    Raises:
        ValueError: the text is not UTF-8.
    """
    content = utf8_text(text, "utf-8-sig")[: _CHARACTERS * sequences * length]
    tokens: list[int] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    count = min(sequences, len(tokens) // length)
    ids = torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)
    return ids, len(tokens)
