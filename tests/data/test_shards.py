"""Folders of text, tokenized on the spot: what is held out, how far is read, what is refused."""

from __future__ import annotations

import lzma
import re

import numpy as np
import pytest

from metis_hf.data.corpus import END_OF_TEXT
from metis_hf.data.shards import text_files, tokenize_embedded, tokenize_folder

WORDS = [f"word {number * number} of a shard\n" for number in range(400)]
END = 0  # id of the end of a text


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train-0.txt").write_text("".join(WORDS) + f"\n{END_OF_TEXT}\n" + "".join(WORDS))
    (tmp_path / "train-1.txt.xz").write_bytes(lzma.compress("".join(WORDS).encode()))
    (tmp_path / "val.txt").write_text("a text that is held out\n")
    (tmp_path / "README.md").write_text("no text")
    return tmp_path


def test_names_say_what_is_held_out(folder):
    (folder / "validation-1.txt.xz").touch()
    train, held_out = text_files(folder)
    assert [path.name for path in train] == ["train-0.txt", "train-1.txt.xz"]
    assert [path.name for path in held_out] == ["val.txt", "validation-1.txt.xz"]


def test_each_document_ends_and_packed_text_is_text(folder):
    train, held_out = tokenize_folder(folder, 400, tokens=10**6)
    ends = np.flatnonzero(train == END)
    assert len(ends) == 3
    assert np.flatnonzero(held_out == END).tolist() == [len(held_out) - 1]
    third = train[ends[1] + 1 :]
    (folder / "train-1.txt.xz").unlink()
    (folder / "train-1.txt").write_text("".join(WORDS))
    unpacked, _ = tokenize_folder(folder, 400, tokens=10**6)
    np.testing.assert_array_equal(unpacked, train)
    # The same words, without the line break that stands before the marker of an end.
    np.testing.assert_array_equal(third[:-1], train[: len(third) - 1])


def test_no_more_is_read_than_is_trained_on(folder):
    (folder / "train-2.txt").write_bytes(b"\xff")
    train, _ = tokenize_folder(folder, 400, tokens=1000)
    assert len(train) == 1000
    (folder / "train-0.txt").write_text("x " * 50)
    with pytest.raises(ValueError, match=r"train-2\.txt is not UTF-8: byte 0 is 0xff"):
        tokenize_folder(folder, 400, tokens=10**6)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-0.txt", "caf\xe9".encode("latin-1"), r"train-0\.txt is not UTF-8: byte 3 is 0xe9"),
        ("val.txt", "a".encode("utf-16"), r"val\.txt is not UTF-8: byte 0 is 0xff"),
        ("train-1.txt.xz", lzma.compress(b"a" * 99)[:-20], r"train-1\.txt\.xz is damaged or trunc"),
        ("train-1.txt.xz", lzma.compress(b"a\xff"), r"train-1\.txt\.xz is not UTF-8: byte 1"),
    ],
)
def test_what_is_no_text_is_named(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tokenize_folder(folder, 400, tokens=10**6)


@pytest.mark.parametrize(
    ("name", "message"),
    [("val.txt", "no file whose name begins with 'val'"), ("train-0.txt", "no file to train on")],
)
def test_a_folder_without_one_of_the_two_is_refused(folder, name, message):
    (folder / "train-1.txt.xz").unlink()
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(folder)) + " has " + message):
        tokenize_folder(folder, 400, tokens=1)


def test_a_small_vocabulary_and_the_embedded_text():
    train, held_out = tokenize_embedded(300, tokens=5000)
    assert (len(train), train.max() < 300) == (5000, True)
    assert len(held_out) >= 5000
