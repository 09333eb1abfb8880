"""The corpus: which files, which split, which tokens."""

import hashlib

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from metis_hf.data import corpus
from metis_hf.data.corpus import Document, chunk, split_documents, stdlib_documents, train_tokenizer

VOCAB = 512


@pytest.fixture(scope="module")
def documents():
    return stdlib_documents()


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_tokenizer(documents, VOCAB, max_chars=300_000)


def test_documents_are_code_in_a_fixed_shuffle(documents):
    paths = [document.path for document in documents]
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= set(paths)
    assert len(set(paths)) == len(paths)
    assert paths == sorted(paths, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    assert not [path for path in paths if "site-packages" in path or "__pycache__" in path]
    assert min(len(document.text) for document in documents) >= corpus.MIN_CHARACTERS
    assert sum(len(document.text) for document in documents) > 8_000_000
    # Generated tables are left out.
    tables = {"pydoc_data/topics.py", "encodings/koi8_r.py", "html/entities.py"}
    assert not tables & set(paths)
    assert not [path for path in paths if path.startswith("_sysconfigdata")]
    assert "encodings/utf_8.py" in paths


def test_splits_partition_the_documents(documents):
    splits = split_documents(documents)
    names = [{document.path for document in split} for split in splits]
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    assert not names[1] & names[2]
    texts = [{document.text for document in split} for split in splits]
    assert not texts[0] & (texts[1] | texts[2])
    kept = sum(map(len, names))
    assert 0.95 * len(documents) < kept <= len(documents)
    # Binomial: four standard deviations of the number of paths that hash below the share.
    for split, share in zip(splits[1:], (0.02, 0.04)):
        deviation = (len(documents) * share * (1 - share)) ** 0.5
        assert abs(len(split) - len(documents) * share) < 4 * deviation


def test_a_file_keeps_its_split_whatever_else_is_there(documents):
    full = split_documents(documents)
    fewer = split_documents([d for d in reversed(documents) if not d.path.startswith("test/")])
    for all_files, some in zip(full, fewer):
        assert {d.path for d in some if not d.path.startswith("test/")} >= {
            d.path for d in all_files if not d.path.startswith("test/")
        }
    # Values computed once: other machines must agree.
    assert {d.path for d in full.test} >= {"sched.py", "netrc.py", "email/message.py"}


def test_near_copies_never_cross_splits(monkeypatch):
    many = [Document(f"codec_{i}.py", f"class Codec_{i}:\n    name = {i}\n") for i in range(50)]
    monkeypatch.setattr(corpus, "VALIDATION_SHARE", 0.3)
    monkeypatch.setattr(corpus, "TEST_SHARE", 0.3)
    assert sum(map(len, split_documents(many))) == 1


def test_tokenizer_round_trips_text(documents, tokenizer):
    for text in [d.text for d in documents[:20]] + [
        "tab\t nul\0 \u00e9\u4e16\U0001f600 \r\n",
        "  ",
    ]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids
    assert tokenizer.encode("") == []
    assert len(tokenizer) == VOCAB
    ids = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert ids == {tokenizer.convert_tokens_to_ids("<|endoftext|>")} == {0}
    assert tokenizer.unk_token is None


def test_tokenizer_is_the_same_trained_again_and_read_from_beside_a_model(
    documents, tokenizer, tmp_path
):
    again = train_tokenizer(documents, VOCAB, max_chars=300_000)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    LlamaConfig(vocab_size=VOCAB).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert loaded.special_tokens_map == tokenizer.special_tokens_map


def test_pack_is_exactly_the_joined_stream(documents, tokenizer):
    few = documents[:5]
    stream = []
    for document in few:
        stream += [*tokenizer.encode(document.text), tokenizer.eos_token_id]
    chunked = chunk(few, tokenizer, 32)
    assert len(chunked) == len(stream) // 32
    assert chunked.column_names == ["input_ids", "labels"]
    assert torch.cat(list(chunked["input_ids"])).tolist() == stream[: len(chunked) * 32]
    row = chunked[3]
    assert row["input_ids"].dtype == torch.int64
    assert row["input_ids"].shape == (32,)
    assert torch.equal(row["input_ids"], row["labels"])
    assert not chunked.cache_files
    some = chunk(documents, tokenizer, 32, max_tokens=330)
    assert [row["input_ids"].tolist() for row in some] == [
        row["input_ids"].tolist() for row in chunked.select(range(10))
    ]


def test_errors(documents, tokenizer):
    with pytest.raises(ValueError, match=r"vocab_size=256 .* need 257"):
        train_tokenizer([Document("a.py", "x = 1\n")], 256)
    with pytest.raises(ValueError, match="no text in 0 documents"):
        train_tokenizer([], 300)
    text = Document("a.py", "x = 1\n")
    tokens = len(tokenizer.encode(text.text)) + 1
    with pytest.raises(ValueError, match=rf"sequence_length=64 exceeds .* tokens, {tokens} \("):
        chunk([text], tokenizer, 64)
    with pytest.raises(ValueError, match=r"exceeds the number of tokens, 50 .*max_tokens=50"):
        chunk(documents, tokenizer, 64, max_tokens=50)
