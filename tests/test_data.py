"""The data pipeline on real text: formats, filters, packing, resuming, errors.

About 45 s of one core; half of it is the test that kills real processes.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import datasets
import numpy as np
import py3langid
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from metis_hf.corpus import Document, stdlib_documents, train_tokenizer
from metis_hf.data import PrepareArguments, load_packed, packed, prepare
from metis_hf.data.filters import is_clean_unicode
from metis_hf.data.perplexity import Outliers, Scorer

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 400
SEQ_LEN = 64
SCORED = 48  # tokens per document that the reference model sees
FOREIGN = [
    "Der Fluss tritt jedes Frühjahr über die Ufer, und die Bauern bringen ihr Vieh auf die Höhe. "
    "Erst im Juni, wenn das Wasser gefallen ist, werden die Wiesen wieder gemäht.",
    "Каждую весну река выходит из берегов, и крестьяне уводят скот на холмы. "
    "Только в июне, когда вода спадает, снова начинают косить луга.",
    "每年春天河水都会漫过堤岸,农民们把牲畜赶到高处。直到六月水退之后,人们才重新开始割草。",
]
# Bytes that are not UTF-8, a replacement character, a NUL, an escape sequence.
JUNK = [
    b"the caf\xe9 was closed",
    "the caf\ufffd was closed".encode(),
    b"a\x00b" * 30,
    b"\x1b[31mred",
]
ENGLISH_KEPT = 0.9  # of sources cut short, most are English prose and code


def english_texts() -> list[str]:
    documents = stdlib_documents()
    texts = [d.text[: 150 + 37 * (i % 29)] for i, d in enumerate(documents[:48])]
    return ["One document is much longer than a sequence. " * 40, *texts]


@pytest.fixture(scope="module")
def raw() -> list[bytes]:
    """Real documents with others strewn in, as bytes; every file format can hold them."""
    mixed = [text.encode() for text in english_texts()]
    for i, other in enumerate([*(text.encode() for text in FOREIGN), *JUNK, b" \n\t "]):
        mixed.insert(3 + 5 * i, other)
    return mixed


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    """A tiny random Llama with a tokenizer; wide weights, so that perplexities differ."""
    path = tmp_path_factory.mktemp("reference")
    tokenizer = train_tokenizer([Document("", text) for text in english_texts()], VOCAB)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def json_line(text: bytes) -> bytes:
    """A JSON line with exactly these bytes in its string, even if they are not UTF-8."""
    parts = json.dumps(text.decode("latin-1"), ensure_ascii=False).encode("latin-1")
    return b'{"id": 1, "text": ' + parts + b"}\n"


def write_source(kind: str, folder: Path, raw: list[bytes]) -> list[str]:
    """Write the documents as files of a kind; returns what to give to `files`."""
    folder.mkdir()
    if kind.startswith("txt"):
        for i, text in enumerate(raw):
            name = folder / f"{i:03}.{kind}"
            name.write_bytes(gzip.compress(text) if kind.endswith(".gz") else text)
        return [str(folder / f"*.{kind}")]
    path = folder / f"a.{kind.removesuffix('-string')}"
    if kind.startswith("parquet"):
        column = pa.array(raw, pa.binary())
        if kind == "parquet-string":  # text columns of real files do hold invalid bytes
            column = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
            path = folder / "a.parquet"
        pq.write_table(pa.table({"id": range(len(raw)), "text": column}), path)
        return [str(path)]
    lines = [json_line(text) for text in raw]
    half = len(lines) // 2
    other = folder / f"b.{kind}"
    pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[kind]
    # Compressed files are often several streams, one after the other.
    path.write_bytes(pack(b"".join(lines[:9])) + pack(b"".join(lines[9:half])))
    other.write_bytes(pack(b"".join(lines[half:])))
    return [str(path), str(other)]


@pytest.fixture(scope="module")
def source(tmp_path_factory, raw) -> list[str]:
    return write_source("jsonl", tmp_path_factory.mktemp("source") / "files", raw)


@pytest.fixture
def arguments(tmp_path, source, reference):
    """A function that gives arguments with changes."""

    def build(**changes) -> PrepareArguments:
        defaults = {
            "output_dir": str(tmp_path / "out"),
            "tokenizer": reference,
            "files": source,
            "seq_len": SEQ_LEN,
            "validation_share": 0.2,
            "reference_model": reference,
            "perplexity_tokens": SCORED,
            "documents_per_part": 20,
            "sequences_per_shard": 60,
        }
        return PrepareArguments(**{**defaults, **changes})

    return build


@pytest.fixture(scope="module", autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def contents(folder: str | Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


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
    """What the text filters should keep, in order."""
    texts = [text.decode() for text in raw if is_text(text)]
    return [t for t in texts if t.strip() and py3langid.classify(t[:2000])[0] == "en"]


def tokens_of(folder: str | Path) -> list[int]:
    """All tokens of the shards in order, read with pyarrow alone."""
    shards = sorted(Path(folder).glob("shard-*.parquet"))
    return [i for shard in shards for row in pq.read_table(shard)["input_ids"] for i in row.as_py()]


def documents_of(folder: str | Path, tokenizer) -> list[str]:
    """Decode the packed tokens and split them at end-of-text; the last one may be cut short."""
    found: list[list[int]] = [[]]
    for token in tokens_of(folder):
        if token == tokenizer.eos_token_id:
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(ids) for ids in found]


def is_packed(found: list[str], texts: list[str]) -> bool:
    """Whether `found` is `texts`, but for a tail shorter than a sequence."""
    whole, tail = found[:-1], found[-1]
    following = "".join(f"{text}\n" for text in texts[len(whole) :])
    return whole == texts[: len(whole)] and following.startswith(tail)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, source, reference) -> tuple[Path, dict]:
    """Output and report of one run without the perplexity filter and validation split."""
    output = tmp_path_factory.mktemp("plain") / "out"
    report = prepare(
        PrepareArguments(
            output_dir=str(output),
            tokenizer=reference,
            files=source,
            seq_len=SEQ_LEN,
            validation_share=0,
            perplexity_filter=False,
            documents_per_part=20,
            sequences_per_shard=60,
        )
    )
    return output, report


def test_packing_keeps_every_token_of_every_kept_document(plain, raw, reference):
    output, report = plain
    tokenizer = AutoTokenizer.from_pretrained(reference)
    texts = expected_texts(raw)
    assert len(texts) >= ENGLISH_KEPT * len(english_texts())
    stream = [i for t in texts for i in [*tokenizer(t)["input_ids"], tokenizer.eos_token_id]]
    kept = len(stream) // SEQ_LEN * SEQ_LEN
    assert tokens_of(output) == stream[:kept]
    assert is_packed(documents_of(output, tokenizer), texts)
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


def independent_perplexity(text: str, reference: str) -> float:
    """One text, no batch, no padding, float64."""
    tokenizer = AutoTokenizer.from_pretrained(reference)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64).eval()
    ids = tokenizer(text)["input_ids"][:SCORED]
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.bos_token_id, *ids]])).logits[0, :-1]
    chosen = logits.log_softmax(-1)[range(len(ids)), ids]
    return math.exp(-float(chosen.mean()))


def test_perplexity_filter_decides_as_an_independent_computation(
    tmp_path, raw, reference, arguments
):
    texts = expected_texts(raw)
    values = np.array([independent_perplexity(text, reference) for text in texts])
    mean, std = values.mean(), values.std()
    kept = [text for text, v in zip(texts, values) if abs(v - mean) <= 2 * std]
    assert 0 < len(texts) - len(kept) < len(texts) / 4  # Chebyshev's bound for two deviations
    report = prepare(arguments(validation_share=0, documents_per_part=4))
    found = report["filters"]["perplexity"]
    rows = [raw.index(text.encode()) for text in texts if text not in kept]
    assert found["dropped"]["example_rows"] == rows[:5]
    assert max(rows[:5]) >= 4  # one beyond the first part
    assert found["mean"] == pytest.approx(mean, rel=1e-4)  # fp32 against fp64
    assert found["std"] == pytest.approx(std, rel=1e-4)
    assert found["dropped"]["documents"] == len(texts) - len(kept)
    assert found["too_high"] == (values > mean + 2 * std).sum()
    tokenizer = AutoTokenizer.from_pretrained(reference)
    assert report["train"]["documents"] == len(kept)
    assert is_packed(documents_of(tmp_path / "out", tokenizer), kept)


def test_a_score_does_not_depend_on_the_rest_of_its_batch(reference):
    texts = [text[:size] for text, size in zip(english_texts(), (5, 300, 40, 120))]
    scores = Scorer(reference, SCORED, 3).score([*texts, ""], lambda n: None)
    alone = [math.log(independent_perplexity(text, reference)) for text in texts]
    assert scores[:-1] == pytest.approx(alone, rel=1e-5)
    assert np.isnan(scores[-1])


def test_outliers_are_symmetric_and_ignore_what_has_no_score():
    values = np.array([*[10.0, 11.0, 9.0] * 10, 100.0, -80.0, np.nan])
    found = Outliers.of(values)
    assert list(np.flatnonzero(~found.keep)) == [30, 31, 32]
    assert (found.too_high, found.too_low) == (1, 1)
    assert found.std == pytest.approx(np.nanstd(values))


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
    assert len(load_packed(tmp_path / "out" / "validation")) == report["validation"]["sequences"]


def test_max_tokens_reads_no_further_than_needed(tmp_path, raw, reference, arguments):
    limit = 3000
    report = prepare(arguments(max_tokens=limit, perplexity_filter=False, validation_share=0))
    assert report["train"]["tokens"] >= limit
    assert report["read"]["documents"] < len(raw)
    last = AutoTokenizer.from_pretrained(reference)(raw[report["read"]["documents"] - 1].decode())
    assert report["train"]["tokens"] - (len(last["input_ids"]) + 1) < limit


def test_processes_change_no_byte(tmp_path, arguments):
    prepare(arguments())
    prepare(arguments(num_proc=2, output_dir=str(tmp_path / "two")))
    assert contents(tmp_path / "two") == contents(tmp_path / "out")


class Killed(BaseException):
    """Nothing in the package catches it."""


def test_stopped_before_and_in_the_middle_of_any_write(tmp_path, arguments, monkeypatch):
    prepare(arguments())
    wanted = contents(tmp_path / "out")
    complete = os.replace
    renames: list[str] = []

    def counted(old, new):
        renames.append(str(new))
        complete(old, new)

    output = tmp_path / "again"
    monkeypatch.setattr(packed.os, "replace", counted)
    prepare(arguments(output_dir=str(output)))
    writes = len(renames)
    assert writes > 15
    shutil.rmtree(output)
    renames.clear()

    def stop_once(old, new):
        if str(new) in renames:
            return complete(old, new)
        renames.append(str(new))
        Path(old).write_bytes(Path(old).read_bytes()[:10])  # half written, never renamed
        raise Killed

    monkeypatch.setattr(packed.os, "replace", stop_once)
    stops = 0
    for _ in range(writes + 1):
        try:
            prepare(arguments(output_dir=str(output)))
            break
        except Killed:
            stops += 1
    assert stops == writes
    assert contents(output) == wanted


KILLED_AT = """
import os, runpy, signal, sys
recipe, mark = sys.argv[1:3]
del sys.argv[1:3]
replace = os.replace
def replace_or_die(old, new):
    if str(new).endswith(mark):
        os.killpg(0, signal.SIGKILL)  # this process and its workers
    replace(old, new)
os.replace = replace_or_die
runpy.run_path(recipe, run_name="__main__")
"""


@pytest.mark.slow
def test_killed_processes_leave_nothing_wrong(tmp_path, arguments, source):
    """SIGKILL in each stage; the next run with the same command goes on."""
    prepare(arguments())
    wanted = contents(tmp_path / "out")
    output = tmp_path / "killed"
    options = ["--files", *source, "--output-dir", str(output), "--num-proc", "2"]
    for name, value in arguments().in_result().items():
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            options += [f"--{name.replace('_', '-')}", str(value)]
    recipe = str(ROOT / "recipes" / "prepare_data.py")
    for mark in ("documents/part-00001.json", "perplexity/part-00001.npy", "shard-00002.parquet"):
        command = [sys.executable, "-c", KILLED_AT, recipe, mark, *options]
        process = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        assert process.returncode == -signal.SIGKILL, process.stderr
        with pytest.raises(FileNotFoundError, match="not finished"):
            load_packed(output)
    command = [sys.executable, recipe, *options]
    assert "perplexity   dropped" in subprocess.check_output(command, text=True)
    assert contents(output) == wanted
    report = prepare(arguments(output_dir=str(output)))  # finished: nothing happens any more
    assert report == json.loads(wanted["report.json"])
    assert contents(output) == wanted


def test_other_arguments_are_refused_by_name(tmp_path, arguments, source):
    prepare(arguments(perplexity_filter=False))
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=r"seq_len was 64, now 32\. Run it with those"):
        prepare(arguments(perplexity_filter=False, seq_len=32))
    prepare(arguments(perplexity_filter=False, num_proc=2))  # not part of the result
    assert contents(tmp_path / "out") == before


def test_a_changed_source_is_refused(tmp_path, raw, arguments, monkeypatch):
    files = write_source("jsonl", tmp_path / "files", raw)
    prepare(arguments(files=files, perplexity_filter=False))
    with open(files[1], "ab") as file:
        file.write(json_line(b"one more document"))
    with pytest.raises(ValueError, match=r"b\.jsonl was \d+, now \d+"):
        prepare(arguments(files=files, perplexity_filter=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 1}, "seq_len=1; choose at least 2"),
        ({"validation_share": 1.0}, "validation_share=1.0"),
        ({"num_proc": 0}, "num_proc=0"),
        ({"files": ["absent/*.jsonl"]}, "absent/.*no such file"),
        ({"files": ["LICENSE"]}, "names must end in .jsonl or .txt"),
        ({"text_column": "body"}, "no column 'body'; its columns are: id, text.*--text-column"),
        ({"perplexity_tokens": 64}, "do not fit the context of .*choose at most 63"),
        ({"seq_len": 10**6}, "less than one sequence of seq_len=1000000; documents dropped: .*uni"),
    ],
)
def test_errors(changes, message, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(arguments(**changes))


def test_error_for_mixed_kinds(tmp_path, source, arguments):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="mixes kinds"):
        prepare(arguments(files=[*source, str(tmp_path / "a.txt")]))


def test_error_for_a_file_that_is_not_json_lines(tmp_path, arguments):
    (tmp_path / "a.jsonl").write_text("plain text\n")
    with pytest.raises(ValueError, match="is not JSON lines: its first line is 'plain text'"):
        prepare(arguments(files=[str(tmp_path / "a.jsonl")]))


def test_error_for_an_unknown_or_numeric_parquet_column(tmp_path, raw, arguments):
    files = write_source("parquet", tmp_path / "files", raw)
    with pytest.raises(ValueError, match="no column 'body'; its columns are: id, text"):
        prepare(arguments(files=files, text_column="body"))
    output = str(tmp_path / "other")
    with pytest.raises(ValueError, match="column 'id' holds int64, not text"):
        prepare(arguments(files=files, text_column="id", output_dir=output))


def test_error_when_nothing_is_left(tmp_path, arguments):
    (tmp_path / "a.txt").write_text(FOREIGN[1])
    with pytest.raises(ValueError, match=r"1 documents were read and 0 training.*language 1"):
        prepare(arguments(files=[str(tmp_path / "a.txt")]))
    (tmp_path / "b.jsonl").write_text("")
    output = str(tmp_path / "other")
    with pytest.raises(ValueError, match="0 documents were read"):
        prepare(arguments(files=[str(tmp_path / "b.jsonl")], output_dir=output))


def test_error_for_a_tokenizer_without_end_of_text(tmp_path, reference, arguments):
    tokenizer = AutoTokenizer.from_pretrained(reference)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="has no eos_token"):
        prepare(arguments(tokenizer=str(tmp_path / "tokenizer")))


def test_error_for_a_directory_with_other_files(tmp_path, arguments):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="is not empty and holds no preparation"):
        prepare(arguments())


def test_error_for_a_reference_model_that_gives_nan(tmp_path, reference, arguments):
    model = AutoModelForCausalLM.from_pretrained(reference)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(reference).save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="gives a loss that is not finite"):
        prepare(arguments(reference_model=str(tmp_path / "broken")))


def test_load_packed(plain, reference):
    output, report = plain
    dataset = load_packed(output, vocab_size=VOCAB)
    assert len(dataset) == report["train"]["sequences"]
    assert dataset.column_names == ["input_ids"]
    assert dataset[0]["input_ids"].shape == (SEQ_LEN,)
    assert dataset[0]["input_ids"].dtype == torch.int64
    assert [int(i) for row in dataset for i in row["input_ids"]] == tokens_of(output)
    meta = json.loads((output / "meta.json").read_text())
    assert meta["num_tokens"] == len(dataset) * SEQ_LEN
    assert meta["vocab_size"] == len(AutoTokenizer.from_pretrained(reference))
    schema = pq.read_schema(output / "shard-00000.parquet")
    assert schema.field("input_ids").type == pa.list_(pa.int32(), SEQ_LEN)


def test_load_packed_errors(tmp_path, plain):
    with pytest.raises(FileNotFoundError, match="so it is no packed dataset"):
        load_packed(tmp_path)
    with pytest.raises(ValueError, match=f"{VOCAB} tokens, but the model embeds 100"):
        load_packed(plain[0], vocab_size=100)
    copy = tmp_path / "copy"
    shutil.copytree(plain[0], copy)
    (copy / "shard-00001.parquet").unlink()  # 60 of 256 sequences
    with pytest.raises(
        ValueError, match=r"has \d+ sequences in \d shards, but .*; copy the missing"
    ):
        load_packed(copy)
    pq.write_table(pa.table({"input_ids": [[1, 2]]}), copy / "shard-00001.parquet")
    with pytest.raises(ValueError, match="expected only input_ids, lists of 64"):
        load_packed(copy)
    (copy / "shard-00001.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="is not parquet"):
        load_packed(copy)
    (copy / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks tokenizer, seq_len"):
        load_packed(copy)
    (copy / "meta.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_packed(copy)
    (copy / "meta.json").unlink()
    with pytest.raises(FileNotFoundError, match="not finished"):
        load_packed(copy)
