"""recipes/prepare_data.py: real text with other documents strewn in, prepared as a user would."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
import runpy
import shutil
import sys
import unicodedata
from pathlib import Path

import numpy as np
import py3langid
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from conftest import llama
from paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from metis_hf.data.chunked import load_chunked
from metis_hf.data.corpus import Document, stdlib_documents, train_tokenizer
from metis_hf.data.perplexity import Scorer
from metis_hf.shared import records
from metis_hf.shared.locks import hold_directory

VOCAB, SEQ_LEN, SCORED = 400, 64, 48
ENGLISH = ["One document is much longer than a sequence. " * 40] + [
    document.text[: 150 + 37 * (i % 29)] for i, document in enumerate(stdlib_documents()[:48])
]
FOREIGN = [
    "Der Fluss tritt jedes Frühjahr über die Ufer, und die Bauern bringen ihr Vieh auf die Höhe.",
    "Каждую весну река выходит из берегов, и крестьяне уводят скот на холмы.",
    "每年春天河水都会漫过堤岸,农民们把牲畜赶到高处。直到六月水退之后,人们才重新开始割草。",
]
JUNK = [b"the caf\xe9 was closed", "the caf\ufffd".encode(), b"a\x00b" * 30, b"\x1b[31mred"]
RAW = [text.encode() for text in ENGLISH]
for place, other in enumerate([*(text.encode() for text in FOREIGN), *JUNK, b" \n\t "]):
    RAW.insert(3 + 5 * place, other)


def json_line(text: bytes) -> bytes:
    """A JSON line with exactly these bytes in its string, even if they are not UTF-8."""
    parts = json.dumps(text.decode("latin-1"), ensure_ascii=False).encode("latin-1")
    return b'{"id": 1, "text": ' + parts + b"}\n"


def write_source(kind: str, folder: Path, raw: list[bytes]) -> list[str]:
    """Write the documents as files of a kind; returns what to give to --files."""
    folder.mkdir()
    if kind == "txt.xz":
        for i, text in enumerate(raw):
            (folder / f"{i:03}.{kind}").write_bytes(lzma.compress(text))
        return [str(folder / f"*.{kind}")]
    if kind == "parquet":  # text columns of real files do hold invalid bytes
        column = pa.array(raw, pa.binary())
        column = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
        pq.write_table(pa.table({"id": range(len(raw)), "text": column}), folder / "a.parquet")
        return [str(folder / "a.parquet")]
    pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[kind]
    lines = [json_line(text) for text in raw]
    # Compressed files are often several streams, one after the other.
    first, second = folder / f"a.{kind}", folder / f"b.{kind}"
    first.write_bytes(pack(b"".join(lines[:9])) + pack(b"".join(lines[9:30])))
    second.write_bytes(pack(b"".join(lines[30:])))
    return [str(first), str(second)]


def is_text(raw: bytes) -> bool:
    """The Unicode rule, written down a second time, character by character."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return False
    return all(
        (unicodedata.category(c) not in ("Cc", "Cs") or c in "\t\n\v\f\r\x85")
        and c != "\ufffd"
        and ord(c) & 0xFFFE != 0xFFFE
        and not 0xFDD0 <= ord(c) <= 0xFDEF
        for c in text
    )


def expected_texts(raw: list[bytes]) -> list[str]:
    texts = [text.decode() for text in raw if is_text(text)]
    return [t for t in texts if t.strip() and py3langid.classify(t[:2000])[0] == "en"]


def tokens_of(folder: Path) -> list[int]:
    """All tokens of the shards in order, read with pyarrow alone."""
    shards = sorted(folder.glob("shard-*.parquet"))
    return [i for shard in shards for row in pq.read_table(shard)["input_ids"] for i in row.as_py()]


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    """A tiny random Llama with a tokenizer; wide weights, so that perplexities differ."""
    path = tmp_path_factory.mktemp("reference")
    train_tokenizer([Document("", text) for text in ENGLISH], VOCAB).save_pretrained(path)
    torch.manual_seed(0)
    model = llama(1, vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.3)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> list[str]:
    return write_source("jsonl", tmp_path_factory.mktemp("source") / "files", RAW)


def run(output: Path, reference: str, files: list[str] | None, **changes) -> dict:
    """Run the recipe in this process; returns its report."""
    options = {
        "tokenizer": reference, "reference_model": reference, "out": output,
        "sequence_length": SEQ_LEN, "validation_share": 0.2, "perplexity_tokens": SCORED,
        "documents_per_part": 20, "sequences_per_shard": 60, **changes,
    }  # fmt: skip
    given = [] if files is None else ["--files", *files]
    if not options.pop("perplexity_filter", True):
        given.append("--no-perplexity-filter")
    given += [str(each) for name, value in options.items() for each in (f"--{name}", value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare_data.py", *given])
        runpy.run_path(str(ROOT / "recipes/prepare_data.py"), run_name="__main__")
    return json.loads((output / "report.json").read_text())


@pytest.fixture
def prepare(tmp_path, source, reference):
    """A function that runs the recipe with changes; errors are what the user reads."""
    return lambda files=source, out=tmp_path / "out", **changes: run(
        out, reference, files, **changes
    )


@pytest.fixture
def refused(prepare, capsys):
    """A function that runs the recipe, which ends with one line, and returns the line."""

    def refused(**changes) -> str:
        with pytest.raises(SystemExit) as end:
            prepare(**changes)
        assert end.value.code == 2
        said = capsys.readouterr().err.splitlines()
        return next(line for line in said if line.startswith("error: "))

    return refused


PLAIN = {"validation_share": 0, "perplexity_filter": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, source, reference) -> tuple[Path, dict]:
    """Output and report without the perplexity filter and validation split."""
    output = tmp_path_factory.mktemp("plain") / "out"
    return output, run(output, reference, source, **PLAIN)


@pytest.fixture(scope="module")
def filtered(tmp_path_factory, source, reference) -> dict[str, bytes]:
    """The files that one run with all filters and a validation split writes."""
    output = tmp_path_factory.mktemp("filtered") / "out"
    run(output, reference, source)
    return contents(output)


def test_every_token_of_every_kept_document_is_there(plain, reference):
    output, report = plain
    tokenizer = AutoTokenizer.from_pretrained(reference)
    texts = expected_texts(RAW)
    assert len(texts) > 0.9 * len(ENGLISH)
    stream = [i for t in texts for i in [*tokenizer(t)["input_ids"], tokenizer.eos_token_id]]
    kept = len(stream) // SEQ_LEN * SEQ_LEN
    assert tokens_of(output) == stream[:kept]
    assert report["train"]["tail_tokens_dropped"] == len(stream) - kept


def test_the_report_counts_what_each_filter_dropped(plain):
    _, report = plain
    dropped = {name: entry["dropped"] for name, entry in report["filters"].items()}
    unclean = [i for i, text in enumerate(RAW) if not is_text(text)]
    assert len(unclean) == len(JUNK) == dropped["unicode"]["documents"]
    assert dropped["unicode"]["example_rows"] == unclean[:5]
    characters = sum(len(text.decode(errors="replace")) for text in JUNK)
    total = sum(len(text.decode(errors="replace")) for text in RAW)
    assert dropped["unicode"]["characters"] == characters
    assert dropped["unicode"]["share_of_characters"] == pytest.approx(characters / total, abs=1e-6)
    assert report["read"] == {"documents": len(RAW), "characters": total}
    assert (dropped["empty"]["documents"], dropped["unreadable"]["documents"]) == (1, 0)
    languages = report["filters"]["language"]["languages"]
    assert all(languages[code] >= 1 for code in ("de", "ru", "zh"))
    kept = report["train"]["documents"]
    assert kept + sum(entry["documents"] for entry in dropped.values()) == len(RAW)
    assert report["arguments"]["sequence_length"] == SEQ_LEN
    assert report["versions"]["datasets"]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "txt.xz", "parquet", "dataset"])
def test_every_source_gives_the_same_tokens(kind, tmp_path, plain, prepare):
    """A folder stands for a dataset of the hub: the same call of load_dataset, no network."""
    if kind == "dataset":
        valid = [text if is_text(text) else b"\xef\xbf\xbd" for text in RAW]
        write_source("jsonl.zst", tmp_path / "files", valid)
        prepare(files=None, dataset=tmp_path / "files", **PLAIN)
    else:
        prepare(files=write_source(kind, tmp_path / "files", RAW), **PLAIN)
    assert tokens_of(tmp_path / "out") == tokens_of(plain[0])


def test_lines_and_characters_that_are_no_documents(tmp_path, prepare):
    """Also: an end-of-text token that is spelled out is text."""
    good = {"text": "A plain English sentence about <|endoftext|> and the weather. " * 20}
    clean = {"text": good["text"] + "tab\t feed\f nel\x85 é 中 😀 \u200b\ufeff\ue000"}
    bad = ['{"text": "cut of', "[1, 2]", '{"text": null}', '{"text": 5}', '{"other": "x"}']
    unclean = "\x00\x07\x1b\x1f\x7f\x80\x9f\ufffd\ufffe\ufdd0\U0010ffff\ud800"
    junk = [json.dumps({"text": f"a{character}b"}) for character in unclean]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(good), *bad, "", *junk, json.dumps(clean)]) + "\n")
    filters = (report := prepare(files=[str(path)], **PLAIN))["filters"]
    assert filters["unreadable"]["dropped"]["example_rows"] == [1, 2, 3, 4, 5]
    assert filters["unicode"]["dropped"]["documents"] == len(unclean)
    assert report["train"]["documents"] == 2
    assert tokens_of(tmp_path / "out").count(0) == 1  # behind the first; the second is cut


def test_validation_is_a_split_of_documents_by_their_text(tmp_path, prepare):
    report = prepare(perplexity_filter=False)
    assert report["train"]["documents"] > 0 < report["validation"]["documents"]
    held_out = load_chunked(tmp_path / "out/validation")
    assert len(held_out) == report["validation"]["sequences"]
    files = write_source("jsonl", tmp_path / "reversed", RAW[::-1])
    other = prepare(files=files, perplexity_filter=False, out=tmp_path / "other")
    for split in ("train", "validation"):
        for count in ("documents", "characters", "tokens"):
            assert other[split][count] == report[split][count]


def test_max_tokens_reads_no_further_than_needed(prepare, reference):
    report = prepare(max_tokens=3000, **PLAIN)
    last = AutoTokenizer.from_pretrained(reference)(RAW[report["read"]["documents"] - 1].decode())
    assert 3000 <= report["train"]["tokens"] < 3000 + len(last["input_ids"]) + 1


@pytest.fixture(scope="module")
def independent_perplexity(reference):
    """One text, no batch, no padding, float64."""
    tokenizer = AutoTokenizer.from_pretrained(reference)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64).eval()

    def perplexity(text: str) -> float:
        ids = tokenizer(text, split_special_tokens=True)["input_ids"][:SCORED]
        with torch.no_grad():
            logits = model(torch.tensor([[tokenizer.bos_token_id, *ids]])).logits[0, :-1]
        return math.exp(-float(logits.log_softmax(-1)[range(len(ids)), ids].mean()))

    return perplexity


def test_perplexity_filter_decides_as_an_independent_computation(prepare, independent_perplexity):
    texts = expected_texts(RAW)
    values = np.array([independent_perplexity(text) for text in texts])
    mean, std = values.mean(), values.std()
    kept = [text for text, v in zip(texts, values) if abs(v - mean) <= 2 * std]
    assert 0 < len(texts) - len(kept) < len(texts) / 4  # Chebyshev's bound for two deviations
    report = prepare(validation_share=0, documents_per_part=4)
    found = report["filters"]["perplexity"]
    rows = [RAW.index(text.encode()) for text in texts if text not in kept]
    assert found["dropped"]["example_rows"] == rows[:5]
    assert (found["mean"], found["std"]) == pytest.approx((mean, std), rel=1e-4)  # fp32 and fp64
    assert found["too_high"] == (values > mean + 2 * std).sum()
    assert report["train"]["documents"] == len(kept)


def test_a_score_does_not_depend_on_the_rest_of_its_batch(reference, independent_perplexity):
    """A special token that is spelled out is scored as text."""
    texts = [text[:size] for text, size in zip(ENGLISH, (5, 300, 40))] + ["x<|endoftext|>y"]
    scores = Scorer(reference, SCORED, 3).score([*texts, ""])
    alone = [math.log(independent_perplexity(text)) for text in texts]
    assert scores[:-1] == pytest.approx(alone, rel=1e-5)
    assert np.isnan(scores[-1])


class Killed(BaseException):
    """Nothing in the package catches it."""


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path, prepare, filtered, monkeypatch):
    """Killed within each kind of write, and gone on with two processes: the same bytes."""
    complete, open_marks = os.replace, ["part-00001", "shard-00001", "report.json", "meta.json"]

    def stop_once(old, new):
        if open_marks and open_marks[0] in str(new):
            open_marks.pop(0)
            Path(old).write_bytes(Path(old).read_bytes()[:10])  # half written, never renamed
            raise Killed
        complete(old, new)

    monkeypatch.setattr(records.os, "replace", stop_once)
    while open_marks:
        with pytest.raises(Killed):
            prepare(num_proc=2)
        with pytest.raises(FileNotFoundError, match="did not finish"):
            load_chunked(tmp_path / "out")
    prepare(num_proc=2)
    assert contents(tmp_path / "out") == filtered
    assert prepare() == json.loads(filtered["report.json"])  # finished: nothing happens any more


def test_other_settings_and_inputs_are_refused(tmp_path, prepare, refused, reference):
    files = write_source("jsonl", tmp_path / "files", RAW)
    own = Path(shutil.copytree(reference, tmp_path / "own"))
    given = {"files": files, "tokenizer": own, "perplexity_filter": False}
    prepare(**given)
    before = contents(tmp_path / "out")
    assert "sequence_length was 64, now 32. Run the recipe with those settings" in refused(
        **given, sequence_length=32
    )
    text = (own / "tokenizer.json").read_text()
    (own / "tokenizer.json").write_text(f"{text}\n")
    assert f"the contents of {own} have changed" in refused(**given)
    (own / "tokenizer.json").write_text(text)
    with open(files[1], "ab") as file:
        file.write(json_line(b"one more document"))
    assert "b.jsonl have changed" in refused(**given)
    assert contents(tmp_path / "out") == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("")
    assert "is not empty and contains no output of this recipe" in refused(out=tmp_path / "other")
    with hold_directory(tmp_path / "held"):
        assert "is in use by" in refused(out=tmp_path / "held")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 1}, "sequence_length=1; choose at least 2"),
        ({"validation_share": 1.0}, "validation_share=1.0"),
        ({"out": Path("a::b")}, "out='a::b': datasets treats a path with '::' as a"),
        ({"files": ["absent/*.jsonl"]}, "absent/*.jsonl: no such file"),
        ({"files": ["LICENSE"]}, "names must end in .jsonl or .txt"),
        ({"text_column": "body"}, "no column 'body'; its columns are: id, text"),
        ({"reference_model": "no/such/model"}, "no/such/model"),
        ({"perplexity_tokens": 64}, "choose at most 63"),
    ],
)
def test_what_is_refused_claims_no_directory(changes, message, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert message in refused(**changes)
    assert not (tmp_path / "out").exists()


def test_a_source_without_text_to_train_on(tmp_path, refused):
    (tmp_path / "b.txt").write_text(FOREIGN[1])
    said = refused(files=[str(tmp_path / "b.txt")], **PLAIN)
    assert "0 training tokens are left, less than one sequence" in said
    (tmp_path / "c.jsonl").touch()
    empty = {"files": [str(tmp_path / "c.jsonl")], "out": tmp_path / "other"}
    assert "0 documents were read" in refused(**empty, **PLAIN)


def test_what_a_reference_model_lacks(tmp_path, reference, refused):
    place = Path(shutil.copytree(reference, tmp_path / "reference"))
    tokenizer = AutoTokenizer.from_pretrained(reference)
    (place / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert "reference has no weights" in refused(reference_model=place)
    (tmp_path / "model.safetensors").rename(place / "model.safetensors")
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(place)
    assert "neither a bos_token nor an eos_token" in refused(reference_model=place)
    assert "has no eos_token" in refused(tokenizer=place)
    larger = train_tokenizer([Document("", text) for text in ENGLISH], VOCAB + 1)
    larger.save_pretrained(place)
    assert f"produces tokens up to {VOCAB}, but the model's vocabulary has" in refused(
        reference_model=place
    )
    assert not (tmp_path / "out").exists()
    model = AutoModelForCausalLM.from_pretrained(reference)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(reference).save_pretrained(place)
    assert "produces a loss that is not finite" in refused(reference_model=place)
