"""Reads conversations and texts for fine-tuning, applies a chat template, and chunks the tokens.

A file that ends in .jsonl, .ndjson or .json has one JSON object per line: {"messages": [{"role":
..., "content": ...}, ...]} or {"text": ...}. Any other file is one text, whose last tokens are held
out. Sequences have no padding: documents are concatenated (with an end token after each JSON text)
and cut to equal lengths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from metis_hf.shared.texts import utf8_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEYS = ("messages", "text")
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PIECE = 1 << 16  # least characters of a text that are tokenized at once
_WASTE = 0.25  # largest share of tokens left unused by whole held-out documents


def is_json_lines(path: Path) -> bool:
    """Return whether a file's suffix says that each line is a JSON object."""
    return path.suffix.lower() in _JSON_LINES


def read_tokens(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the token ids of each conversation or text of a file, in order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is not a valid object (the message has its number); the file is empty,
            not UTF-8, has a lone surrogate, or has JSON objects although its suffix says text; the
            chat template rejects a conversation; or as in `tokens_of`.
    """
    for number, document in _numbered(path):
        try:
            ids = tokens_of(document, tokenizer)
        except (TemplateError, TypeError) as error:  # raised by the template's code
            raise ValueError(
                f"{path}, line {number}: the chat template of {tokenizer.name_or_path} does not "
                f"accept the conversation ({error}); fix the line, or remove it"
            ) from None
        yield ids


def _numbered(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (number, document) pairs of a file, numbered from 1 by JSON line or piece."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give JSON lines of messages or text")
    content = utf8_text(path, "utf-8-sig")
    if not is_json_lines(path):
        refuse_objects(path, content)
        pieces = enumerate(_pieces(content), 1)
        documents = [(n, {"text": piece, "goes_on": True}) for n, piece in pieces]
    else:
        # Not splitlines, which also splits at characters that JSON strings may contain.
        lines = enumerate(content.split("\n"), 1)
        documents = [(n, _document(path, n, line)) for n, line in lines if line.strip()]
    if not documents:
        raise ValueError(f"{path} is empty; give JSON lines of messages or text")
    return documents


def _pieces(text: str) -> list[str]:
    """Split a text after paragraphs, or after lines if it has no blank lines.

    Each piece has at least `_PIECE` characters, except the last: few cuts change few tokens.
    """
    end = "\n\n" if "\n\n" in text.strip() else "\n"
    pieces, begin = [], 0
    while begin < len(text):
        behind = text.find(end, begin + _PIECE)
        behind = len(text) if behind < 0 else behind + len(end)
        pieces.append(text[begin:behind])
        begin = behind
    return [piece for piece in pieces if piece.strip()]


def refuse_objects(path: Path, content: str) -> None:
    """Refuse JSON lines in a file whose suffix says that it is a text."""
    try:
        found = json.loads(content.lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict) and any(key in found for key in _KEYS):
        raise ValueError(
            f"{path} contains JSON objects, but its suffix says that it is plain text; rename it "
            f"to {path.with_suffix('.jsonl').name}"
        )


def refuse_surrogates(path: Path, number: int, found: Any) -> None:
    """Refuse a JSON line that contains a lone surrogate."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ValueError(
            f"{path}, line {number}: {half} is one half of a surrogate pair, which remains when a "
            "text is cut inside an emoji; fix the line, or remove it"
        ) from None


def _document(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # also an integer of too many digits
        raise ValueError(
            f"{path}, line {number}, is not JSON: {error}. Each line must be one complete object"
        ) from None
    refuse_surrogates(path, number, found)
    if isinstance(found, dict) and isinstance(found.get("text"), str):
        return {"text": found["text"]}
    messages = found.get("messages") if isinstance(found, dict) else None
    if messages == []:
        raise ValueError(f"{path}, line {number}: no messages; remove the line, or add one")
    if isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each
        for each in messages
    ):
        return {"messages": messages}
    raise ValueError(
        f"{path}, line {number}: expected an object with {' or '.join(_KEYS)}; messages must be a "
        'list of {"role": ..., "content": ...}'
    )


def tokens_of(document: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text plus the end token, or of a conversation by its template.

    Raises:
        ValueError: the document is a conversation and the tokenizer has no chat template.
    """
    if "messages" in document:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the data contain conversations, but the tokenizer of {tokenizer.name_or_path} "
                "has no chat template; set tokenizer.chat_template and save the tokenizer, or use "
                "plain texts"
            )
        return list(
            tokenizer.apply_chat_template(document["messages"], tokenize=True, return_dict=False)
        )
    ids = tokenizer(document["text"], add_special_tokens=False, verbose=False)["input_ids"]
    end = None if document.get("goes_on") else tokenizer.eos_token_id
    return [*ids, *([] if end is None else [end])]


def equal_rows(documents: Iterable[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Yield sequences of `length` tokens from the concatenated documents; drop the tail."""
    held: list[int] = []
    for document in documents:
        held.extend(document)
        whole = len(held) - len(held) % length
        for start in range(0, whole, length):
            yield held[start : start + length]
        del held[:whole]  # once per document: deletion moves the remaining tokens


def first_sequences(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, count: int
) -> Tensor:
    """Return the first sequences of a file, token ids [n length] with 1 <= n <= count.

    The file is tokenized only as far as needed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as in `read_tokens`, or the file has fewer than `length` tokens.
    """
    rows = list(islice(equal_rows(read_tokens(path, tokenizer), length), count))
    if not rows:
        raise ValueError(
            f"{path} has fewer than {length} tokens, the length of one sequence; use a longer "
            "text or shorter sequences"
        )
    return torch.tensor(rows)


def check_vocabulary(rows: Tensor, vocabulary: int, model: str | Path) -> None:
    """Raise ValueError, which names the model, if token ids [n length] exceed its vocabulary."""
    if int(rows.max()) >= vocabulary:
        raise ValueError(
            f"the tokenizer of {model} produces token {int(rows.max())}, but the model's "
            f"vocabulary has {vocabulary} tokens: they do not match; save the model's own "
            "tokenizer in its directory"
        )


def chunked_sequences(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, held_out: int
) -> tuple[Tensor, Tensor]:
    """Return a file's sequences to train on [n length] and held out [held_out length], token ids.

    Whole documents are held out from the end of the file, enough to fill `held_out` >= 1 sequences;
    from a text, its last tokens.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as in `read_tokens`; there is too little text; or the held-out documents are so
            long that more than a quarter of all tokens would be unused.
    """
    documents = list(read_tokens(path, tokenizer))
    total, wanted = sum(map(len, documents)), held_out * length
    if not is_json_lines(path):
        tokens = [token for document in documents for token in document]
        documents = [tokens[: max(0, total - wanted)], tokens[max(0, total - wanted) :]]
    first = len(documents)
    count = 0
    while first > 0 and count < wanted:
        first -= 1
        count += len(documents[first])
    unused = count - wanted
    if unused > _WASTE * total:
        raise ValueError(
            f"{path}: to hold out {wanted:,} tokens, whole documents with {count:,} tokens are "
            f"taken from the end of the file, so {unused:,} of {total:,} tokens would be unused. "
            "Put shorter documents last, or split long ones"
        )
    train = list(equal_rows(documents[:first], length))
    held = list(equal_rows(documents[first:], length))[:held_out]
    if not train or len(held) < held_out:
        raise ValueError(
            f"{path} has {total:,} tokens in {len(documents):,} documents, too few for {held_out} "
            f"held-out sequences of {length} tokens and at least one training sequence. Use more "
            "data, or a smaller --eval-sequences or --sequence-length"
        )
    return torch.tensor(train), torch.tensor(held)
