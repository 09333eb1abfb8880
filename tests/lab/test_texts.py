"""The beginning of a text as a model reads it: what is refused."""

from __future__ import annotations

import pytest
import transformers

from metis_hf.data.corpus import Document, train_tokenizer
from metis_hf.lab.texts import model_sequences

TEXT = "\n".join(f"def f{i}(x):\n    return x * {i} + f{i // 2}(x - {i % 7})" for i in range(99))


def test_refusals(tmp_path):
    tokenizer, file = train_tokenizer([Document("a", TEXT)], 300), tmp_path / "text.txt"

    def read(text=TEXT, vocabulary=300, **changes):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        config = transformers.LlamaConfig(vocab_size=vocabulary, max_position_embeddings=128)
        arguments = {"sequences": 4, "length": 16, "fewest": 2} | changes
        return model_sequences(tokenizer, file, config=config, model="NAME", **arguments)

    assert read().shape == (4, 16)
    for changes, said in (
        ({"length": 4}, "4 sequences of 4 tokens are too few; choose at least 2 sequences of 8"),
        ({"sequences": 1}, "choose at least 2 sequences of 8"),
        ({"length": 256}, "256 tokens do not fit in the context of NAME, 128 tokens"),
        ({"text": "def f(x):"}, r"has \d tokens, but at least 32 \(2 x 16\) are needed"),
        ({"text": " "}, "text.txt is empty"),
        (
            {"vocabulary": 100},
            "tokenizer of NAME produces token .*, but the model's vocabulary has 100",
        ),
        ({"text": b"\xff"}, "not UTF-8"),
    ):
        with pytest.raises(ValueError, match=said):
            read(**changes)
