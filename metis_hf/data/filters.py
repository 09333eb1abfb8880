"""The text filters: what is a readable, Unicode, English document; and its tokens.

Here: decoding, the three verdicts, the split by hash, all as one function of a batch that
`datasets.Dataset.map` runs in many processes. Perplexity needs a model: `metis_hf.data.perplexity`.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LANGUAGE_CHARACTERS = 2000  # of real prose cut at 1000 the detector errs on less than 0.1 %

RULES = {
    "unreadable": "no text: a line that is no JSON object, or a text column that is missing, null "
    "or not a string",
    "unicode": "contains bytes that are not UTF-8, U+FFFD, an unpaired surrogate, a noncharacter, "
    "or a control character (category Cc) that is not white space",
    "empty": "nothing but white space",
    "language": f"the most likely language of the first {LANGUAGE_CHARACTERS} characters is not "
    "English (py3langid)",
}
KEPT = ""

# White space among the controls (tab, LF, VT, FF, CR, NEL) is text. Every plane ends in two
# noncharacters; unassigned code points depend on the Unicode version and are left alone.
_NOT_TEXT = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffd"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)


def is_clean_unicode(text: str) -> bool:
    """Return whether `text` passes the `unicode` rule of `RULES`.

    Bytes that were not UTF-8 must have been decoded with `errors="replace"`.
    """
    return _NOT_TEXT.search(text) is None


def language(text: str) -> str:
    """Return the likeliest language (ISO 639) of the first `LANGUAGE_CHARACTERS` characters."""
    return detector()(text[:LANGUAGE_CHARACTERS])[0]


@functools.cache
def detector() -> Callable[[str], tuple[str, float]]:
    """Return py3langid's classifier with its model, part of its wheel, loaded once a process.

    Forked processes inherit it; those that are spawned, as on macOS, load it again.
    """
    try:
        from py3langid import classify
    except ImportError as error:
        raise ImportError(
            "the language filter needs py3langid; install it with `pip install 'metis-hf[data]'`"
        ) from error
    classify("")  # it loads the model at the first call
    return classify


def hash_fraction(text: str) -> float:
    """Return a number in [0, 1) from the text alone: equal documents land in the same split."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def decode(raw: bytes | None, json_column: str | None) -> str | None:
    """Return the text of one document, or None if there is none.

    Args:
        raw: The document, or with `json_column` one line of JSON that holds it.
        json_column: Key of the text in the JSON object; None if `raw` is the text itself.
    """
    if raw is None:
        return None
    text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace")
    if json_column is None:
        return text
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = row.get(json_column) if isinstance(row, dict) else None
    return value if isinstance(value, str) else None


class TextFilter:
    """Judges and tokenizes a batch of raw documents.

    Args:
        tokenizer: With an end-of-text token, which is put after every document.
        json_column: As in `decode`.
        validation_share: Share of documents marked as validation.
        keep_text: Whether a later filter still needs the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        json_column: str | None,
        validation_share: float,
        keep_text: bool,
    ) -> None:
        self.tokenizer, self.json_column = tokenizer, json_column
        self.validation_share, self.keep_text = validation_share, keep_text

    def __call__(self, batch: dict[str, list[bytes | None]]) -> dict[str, list[Any]]:
        """Return columns `reason` (`KEPT` or a key of `RULES`), `language`, `characters`, `text`,
        `input_ids`, `num_tokens` and `validation`; the last four are empty for dropped documents.
        """
        texts = [decode(raw, self.json_column) for raw in batch["document"]]
        verdicts = [self._judge(text) for text in texts]
        kept = [text if reason == KEPT else None for text, (reason, _) in zip(texts, verdicts)]
        tokens = iter(self._tokenize([text for text in kept if text is not None]))
        input_ids = [np.empty(0, np.int32) if text is None else next(tokens) for text in kept]
        return {
            "reason": [reason for reason, _ in verdicts],
            "language": [code for _, code in verdicts],
            "characters": [len(text or "") for text in texts],
            "text": [(text or "") if self.keep_text else "" for text in kept],
            "input_ids": input_ids,
            "num_tokens": [len(ids) for ids in input_ids],
            "validation": [
                text is not None and hash_fraction(text) < self.validation_share for text in kept
            ],
        }

    def _judge(self, text: str | None) -> tuple[str, str]:
        if text is None:
            return "unreadable", ""
        if not is_clean_unicode(text):
            return "unicode", ""
        if not text.strip():
            return "empty", ""
        code = language(text)
        return (KEPT if code == "en" else "language"), code

    def _tokenize(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,  # an end-of-text token spelled out in a document is text
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        end = self.tokenizer.eos_token_id
        return [np.asarray([*ids, end], dtype=np.int32) for ids in encoded]
