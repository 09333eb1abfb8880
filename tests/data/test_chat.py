"""Conversations and texts: read, put into the chat template, chunked without padding, held out."""

from __future__ import annotations

import copy
import gzip
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from texts import documents

from metis_hf.data.chat import (
    check_vocabulary,
    chunked_sequences,
    equal_rows,
    first_sequences,
    read_tokens,
    tokens_of,
)
from metis_hf.data.corpus import Document, train_tokenizer
from metis_hf.lab.texts import read_sequences

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
TALK = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}


@pytest.fixture(scope="module")
def tokenizer():
    found = train_tokenizer(documents()[:3], vocab_size=300)
    found.chat_template = TEMPLATE
    return found


def lines(path, *documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_line_breaks_inside_strings_and_a_byte_order_mark(tokenizer, tmp_path):
    documents = [{"text": "one\u2028two\x85three"}, TALK]
    tokens = [tokens_of(each, tokenizer) for each in documents]
    text = "\ufeff" + "\n".join(json.dumps(each, ensure_ascii=False) for each in documents)
    for name in ("a.jsonl", "a.JSONL", "a.json", "a.ndjson"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert list(read_tokens(tmp_path / name, tokenizer)) == tokens
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"a.txt contains JSON objects.*; rename it to a.jsonl"):
        list(read_tokens(tmp_path / "a.txt", tokenizer))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_a_file_that_is_not_utf8_is_named(name, tokenizer, tmp_path):
    """A compressed file is read as a text by its name."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"text"))
    message = rf"{name} is not UTF-8 text \('utf-8' codec can't decode"
    with pytest.raises(ValueError, match=message):
        first_sequences(path, tokenizer, 8, 1)
    with pytest.raises(ValueError, match=message):
        read_sequences(tokenizer, path, 1, 8)


def test_sequences_of_a_text(tokenizer, tmp_path):
    """Without the byte order mark; at most so many, and none of a text that is too short."""
    text = "one two three four five six seven"
    (tmp_path / "a.txt").write_text(f"\ufeff{text}", encoding="utf-8")
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    for most, length in ((2, 3), (100, 4), (1, 1000)):
        found, count = read_sequences(tokenizer, tmp_path / "a.txt", most, length)
        rows = min(most, len(wanted) // length)
        assert found.shape == (rows, length)
        assert found.dtype == torch.int64
        assert found.flatten().tolist() == wanted[: rows * length]
        assert count == len(wanted)


def test_sequences_of_json_lines_are_those_that_are_trained_on(tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", TALK, *({"text": f"text {i}"} for i in range(9)))
    found, count = read_sequences(tokenizer, path, 3, 8)
    assert torch.equal(found, first_sequences(path, tokenizer, 8, 3))
    assert count >= 24


def test_a_text_whose_tokens_are_long_is_read_until_they_suffice(tmp_path):
    """As runs of blanks are, of which one token may hold a hundred."""
    text = (" " * 100 + "x") * 400
    tokenizer = train_tokenizer([Document("a", text[:5000])], vocab_size=300)
    (tmp_path / "a.txt").write_text(text)
    wanted = tokenizer(text)["input_ids"]
    found, _ = read_sequences(tokenizer, tmp_path / "a.txt", 8, 8)
    assert found.flatten().tolist() == wanted[:64]
    _, count = read_sequences(tokenizer, tmp_path / "a.txt", 9, len(wanted))
    assert count == len(wanted)


def test_a_conversation_goes_through_the_template(tokenizer):
    ids = tokens_of(TALK, tokenizer)
    assert tokenizer.decode(ids) == "<user>Why?<assistant>So." + tokenizer.eos_token
    text = tokens_of({"text": "one"}, tokenizer)
    assert tokenizer.decode(text) == "one" + tokenizer.eos_token


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=12), st.integers(1, 7))
def test_chunks_keep_the_order_and_drops_the_rest_alone(documents, length):
    found = list(equal_rows(documents, length))
    flat = [token for document in documents for token in document]
    assert [token for row in found for token in row] == flat[: len(flat) // length * length]
    assert all(len(row) == length for row in found)


def test_the_last_tokens_of_a_text_are_held_out(tokenizer, tmp_path):
    """And no more, however long its paragraphs are."""
    path = tmp_path / "a.txt"
    text = "A title\n\n" + " ".join(f"line {i}" for i in range(2000))
    path.write_text(text)
    train, held = chunked_sequences(path, tokenizer, 16, 2)
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert held.flatten().tolist() == wanted[-32:]
    kept = (len(wanted) - 32) // 16 * 16
    assert train.flatten().tolist() == wanted[:kept]


def test_the_last_documents_are_held_out(tokenizer, tmp_path):
    documents = [{"text": f"text {i} " * 9} for i in range(30)]
    path = lines(tmp_path / "a.jsonl", *documents)
    train, held = chunked_sequences(path, tokenizer, 16, 3)
    assert held.shape == (3, 16)
    seen, kept = tokenizer.decode(train.flatten()), tokenizer.decode(held.flatten())
    assert "text 0" in seen
    assert "text 29" not in seen
    first = int(kept.removeprefix("text ").split()[0])
    assert f"text {first} " not in seen
    assert f"text {first - 2} " in seen


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (
            '{"text": "a"}\n{"text": ',
            r"line 2, is not JSON: .*\. Each line must be one complete object",
        ),
        (f'{{"text": "a", "id": {"1" * 5000}}}', "a.jsonl, line 1, is not JSON: .*4300"),
        ('{"text": "a"}\n{"messages": []}', "a.jsonl, line 2: no messages"),
        (
            '{"text": "a"}\n{"text": "cut \\ud83d"}',
            r"a.jsonl, line 2: \\ud83d is one half of a surr",
        ),
        ('{"prompt": "a"}', "line 1: expected an object with messages or text"),
        ('{"messages": [{"content": "a"}]}', "line 1: expected an object"),
        ('{"text": "short"}', "at least one training sequence.*--eval-sequences"),
        (
            f'{{"text": "{"word " * 900}"}}\n' * 2,  # whole documents would be held out
            r"hold out 16 tokens, whole documents with [\d,]+ tokens .*, so [\d,]+ of [\d,]+ to",
        ),
    ],
)
def test_bad_files(content, message, tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        chunked_sequences(path, tokenizer, 16, 1)


def test_no_file_and_no_template(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a file; give JSON lines"):
        list(read_tokens(tmp_path / "none.jsonl", tokenizer))
    plain = train_tokenizer(documents()[:2], vocab_size=300)
    with pytest.raises(ValueError, match="no chat template; set tokenizer"):
        tokens_of(TALK, plain)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ raise_exception('no user may speak') }}", "a"),
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", None),
    ],
)
def test_a_conversation_that_the_template_does_not_take(template, content, tokenizer, tmp_path):
    talk = {"messages": [{"role": "user", "content": content}]}
    path = lines(tmp_path / "a.jsonl", {"text": "one"}, talk)
    refusing = copy.copy(tokenizer)
    refusing.chat_template = template
    message = r"a.jsonl, line 2: the chat template of .* does not accept .*\(.+\); fix the line"
    with pytest.raises(ValueError, match=message):
        first_sequences(path, refusing, 64, 1)


def test_the_last_token_of_a_model_is_its_own():
    rows = torch.tensor([[0, 299]])
    check_vocabulary(rows, 300, "model")
    with pytest.raises(ValueError, match="produces token 299, but the model's vocabulary has 299"):
        check_vocabulary(rows, 299, "model")


def test_the_first_sequences_of_a_long_text(tokenizer, tmp_path):
    """It is tokenized piece by piece, cut behind paragraphs, and nothing of it is lost."""
    text = "one two three\nfour\n\n" * 8000 + "\n\n the end"
    (tmp_path / "a.txt").write_text(text)
    pieces = [tokenizer.decode(ids) for ids in read_tokens(tmp_path / "a.txt", tokenizer)]
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    start = tokenizer(text[:200], add_special_tokens=False)["input_ids"]
    found = first_sequences(tmp_path / "a.txt", tokenizer, 7, 3)
    assert found.flatten().tolist() == start[:21]
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(ValueError, match=r"fewer than 10000 tokens, the length of one sequence"):
        first_sequences(tmp_path / "b.txt", tokenizer, 10_000, 1)
