"""The beginning of a text as sequences of tokens, for what measures a model and trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metis_hf.data.chat import is_json_lines, read_tokens, refuse_objects
from metis_hf.shared.texts import utf8_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS = 32  # of a token: a long text is cut before it is tokenized


def read_sequences(
    tokenizer: PreTrainedTokenizerBase, text: Path, sequences: int, length: int
) -> tuple[Tensor, int]:
    """Return token ids [n length], n <= sequences, and how many tokens were read.

    Where n < sequences, they are all that the file has.

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
    """Return the tokens of the beginning of a text: as many as are wanted, or all there are."""
    cut = _CHARACTERS * wanted
    while True:
        ids = tokenizer(content[:cut], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= wanted or cut >= len(content):
            return ids
        cut *= 2
