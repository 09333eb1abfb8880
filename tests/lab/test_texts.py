"""The beginning of a text as a model reads it: what is refused."""

from __future__ import annotations

import pytest
import transformers

from metis_hf.data.corpus import Document, train_tokenizer
from metis_hf.lab.texts import model_sequences

TEXT = "\n".join(f"def f{i}(x):\n    return x * {i} + f{i // 2}(x - {i % 7})" for i in range(99))
OPTIONS = {"sequences": 4, "length": 16, "fewest": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([Document("a", TEXT)], 300)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"length": 4}, "4 sequences of 4 tokens; choose at least 2 of 8"),
        ({"sequences": 1}, "choose at least 2 of 8"),
        ({"length": 256}, "256 tokens do not fit the context of NAME, 128 tokens"),
        ({"text": "def f(x):"}, r"has \d tokens; at least 32 are needed, 2 x 16"),
        ({"text": " "}, r"has \d tokens; at least 32"),
        ({"vocabulary": 100}, "tokenizer of NAME gives token .*, and the model knows 100"),
        ({"text": b"\xff"}, "not UTF-8"),
        ({}, None),
    ],
)
def test_refusals(changes, said, tokenizer, tmp_path):
    text = changes.pop("text", TEXT)
    file = tmp_path / "text.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = transformers.LlamaConfig(
        vocab_size=changes.pop("vocabulary", 300), max_position_embeddings=128
    )
    arguments = OPTIONS | changes

    def read():
        return model_sequences(tokenizer, file, config=config, model="NAME", **arguments)

    if said is None:
        assert read().shape == (4, 16)
        return
    with pytest.raises(ValueError, match=said):
        read()
