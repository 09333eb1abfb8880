"""Documents with others strewn in, files of every kind, and what should become of them."""

from __future__ import annotations

import gzip
import json
import unicodedata
from pathlib import Path

import py3langid
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from metis_hf.data.corpus import stdlib_documents

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


def english_texts() -> list[str]:
    documents = stdlib_documents()
    texts = [d.text[: 150 + 37 * (i % 29)] for i, d in enumerate(documents[:48])]
    return ["One document is much longer than a sequence. " * 40, *texts]


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
    """Decode the chunked tokens and split them at end-of-text; the last one may be cut short."""
    found: list[list[int]] = [[]]
    for token in tokens_of(folder):
        if token == tokenizer.eos_token_id:
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(ids) for ids in found]


def are_chunks_of(found: list[str], texts: list[str]) -> bool:
    """Whether `found` is `texts`, but for a tail shorter than a sequence."""
    whole, tail = found[:-1], found[-1]
    following = "".join(f"{text}\n" for text in texts[len(whole) :])
    return whole == texts[: len(whole)] and following.startswith(tail)
