"""Chunking of real text: every kept token, every format, the report, the validation split."""

from __future__ import annotations

import json
from importlib import metadata

import datasets
import pytest
from transformers import AutoTokenizer

import metis_hf
from data.preparation.sources import (
    JUNK,
    SEQ_LEN,
    are_chunks_of,
    contents,
    documents_of,
    english_texts,
    expected_texts,
    is_text,
    tokens_of,
    write_source,
)
from metis_hf.data import load_chunked, prepare
from metis_hf.data.filters import is_clean_unicode

ENGLISH_KEPT = 0.9  # of sources cut short, most are English prose and code


def test_packing_keeps_every_token_of_every_kept_document(plain, raw, reference):
    output, report = plain
    tokenizer = AutoTokenizer.from_pretrained(reference)
    texts = expected_texts(raw)
    assert len(texts) >= ENGLISH_KEPT * len(english_texts())
    stream = [i for t in texts for i in [*tokenizer(t)["input_ids"], tokenizer.eos_token_id]]
    kept = len(stream) // SEQ_LEN * SEQ_LEN
    assert tokens_of(output) == stream[:kept]
    assert are_chunks_of(documents_of(output, tokenizer), texts)
    assert report["train"]["tail_tokens_dropped"] == len(stream) - kept
    assert max(map(len, (tokenizer(t)["input_ids"] for t in texts))) > 2 * SEQ_LEN  # one was split


def test_the_report_counts_what_each_filter_dropped(plain, raw):
    _, report = plain
    dropped = {name: entry["dropped"] for name, entry in report["filters"].items()}
    unclean = [i for i, text in enumerate(raw) if not is_text(text)]
    assert len(unclean) == len(JUNK)
    assert dropped["unicode"]["documents"] == len(JUNK)
    assert dropped["unicode"]["example_rows"] == unclean[:5]
    characters = sum(len(text.decode(errors="replace")) for text in JUNK)
    assert dropped["unicode"]["characters"] == characters
    assert dropped["empty"]["documents"] == 1
    assert dropped["unreadable"]["documents"] == 0
    languages = report["filters"]["language"]["languages"]
    assert all(languages[code] >= 1 for code in ("de", "ru", "zh"))
    assert report["read"]["documents"] == len(raw)
    total = sum(len(text.decode(errors="replace")) for text in raw)
    assert report["read"]["characters"] == total
    share = dropped["unicode"]["share_of_characters"]
    assert share == pytest.approx(characters / total, abs=1e-6)
    kept = report["train"]["documents"]
    assert kept + sum(entry["documents"] for entry in dropped.values()) == len(raw)
    assert report["versions"]["datasets"] == datasets.__version__
    assert report["arguments"]["seq_len"] == SEQ_LEN


@pytest.mark.parametrize(
    "kind", ["jsonl.gz", "jsonl.zst", "txt", "txt.gz", "parquet", "parquet-string"]
)
def test_every_file_format_gives_the_same_shards(kind, tmp_path, raw, plain, arguments):
    files = write_source(kind, tmp_path / "files", raw)
    prepare(arguments(files=files, perplexity_filter=False, validation_share=0))
    shards = {name: data for name, data in contents(plain[0]).items() if name.startswith("shard")}
    found = contents(tmp_path / "out")
    assert {name: found[name] for name in shards} == shards
    assert len([name for name in found if name.startswith("shard")]) == len(shards) > 1


def test_a_dataset_by_name_is_streamed(tmp_path, raw, plain, arguments):
    """A folder stands for a hub dataset: the same call of load_dataset, no network."""
    valid = [text if is_text(text) else b"\xef\xbf\xbd" for text in raw]
    write_source("jsonl.zst", tmp_path / "dataset", valid)
    prepare(
        arguments(
            dataset=str(tmp_path / "dataset"),
            files=None,
            perplexity_filter=False,
            validation_share=0,
        )
    )
    assert tokens_of(tmp_path / "out") == tokens_of(plain[0])


def test_lines_that_are_no_documents_are_counted_and_dropped(tmp_path, arguments):
    good = json.dumps({"text": "This is a plain English sentence about the weather. " * 20})
    bad = [
        '{"text": "cut of',
        "[1, 2]",
        '{"text": null}',
        '{"text": 5}',
        '{"other": "x"}',
        '{"text": "unpaired \\ud800 surrogate"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([good, *bad, "", good]) + "\n")
    report = prepare(arguments(files=[str(path)], perplexity_filter=False, validation_share=0))
    assert report["filters"]["unreadable"]["dropped"]["example_rows"] == [1, 2, 3, 4, 5]
    assert report["filters"]["unicode"]["dropped"]["example_rows"] == [6]
    assert report["train"]["documents"] == 2


def test_an_end_of_text_token_inside_a_document_is_text(tmp_path, reference, arguments):
    text = "The marker <|endoftext|> is written out in this English sentence. " * 10
    (tmp_path / "a.txt").write_text(text)
    prepare(arguments(files=[str(tmp_path / "a.txt")], perplexity_filter=False, validation_share=0))
    tokens = tokens_of(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(reference)
    assert tokenizer.eos_token_id not in tokens
    assert text.startswith(tokenizer.decode(tokens))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("tab\t newline\n form feed\f nel\x85 é 中 😀 \u200b\ufeff\ue000", True),
        *(
            (f"a{c}b", False)
            for c in "\x00\x07\x1b\x1f\x7f\x80\x9f\ufffd\ufffe\ufdd0\U0010ffff\ud800"
        ),
    ],
)
def test_unicode_rule(text, clean):
    assert is_clean_unicode(text) is clean


def test_validation_is_a_split_of_documents_by_their_text(tmp_path, raw, reference, arguments):
    report = prepare(arguments(perplexity_filter=False))
    train, validation = report["train"]["documents"], report["validation"]["documents"]
    assert min(train, validation) > 0
    assert train + validation == len(expected_texts(raw))
    tokenizer = AutoTokenizer.from_pretrained(reference)
    held_out = documents_of(tmp_path / "out" / "validation", tokenizer)
    assert not set(held_out[:-1]) & set(documents_of(tmp_path / "out", tokenizer))
    # In reversed order the same documents are held out.
    files = write_source("jsonl", tmp_path / "reversed", raw[::-1])
    other = prepare(
        arguments(files=files, perplexity_filter=False, output_dir=str(tmp_path / "other"))
    )
    assert other["validation"]["characters"] == report["validation"]["characters"]
    assert len(load_chunked(tmp_path / "out" / "validation")) == report["validation"]["sequences"]


def test_max_tokens_reads_no_further_than_needed(tmp_path, raw, reference, arguments):
    limit = 3000
    report = prepare(arguments(max_tokens=limit, perplexity_filter=False, validation_share=0))
    assert report["train"]["tokens"] >= limit
    assert report["read"]["documents"] < len(raw)
    last = AutoTokenizer.from_pretrained(reference)(raw[report["read"]["documents"] - 1].decode())
    assert report["train"]["tokens"] - (len(last["input_ids"]) + 1) < limit


def test_the_package_may_be_on_the_path_alone(arguments, monkeypatch):
    found = metadata.Distribution.from_name

    def without(name):
        if name.replace("_", "-") == "metis-hf":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", without)
    report = prepare(arguments(perplexity_filter=False, validation_share=0))
    assert report["versions"]["metis-hf"] == metis_hf.__version__
