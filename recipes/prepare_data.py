"""Filter text as in arXiv:2509.00404 and chunk it into training sequences: see docs/data.md.

python recipes/prepare_data.py --tokenizer meta-llama/Meta-Llama-3-8B --out data/dclm \
    --sequence-length 1024 --max-tokens 100000000000 --num-proc 32
python recipes/prepare_data.py --tokenizer path --out data/mine --files 'text/*.jsonl.gz'
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from py3langid import classify
from tqdm.auto import tqdm
from transformers import AutoTokenizer, HfArgumentParser

from metis_hf.data.chunked import ARGUMENTS, META, TOKENIZER, write_shards
from metis_hf.data.documents import local_files, open_files, text_of
from metis_hf.data.perplexity import Scorer, check_reference, device_type
from metis_hf.shared.inputs import digest, digest_of_path
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.messages import one_line_errors
from metis_hf.shared.records import flatten, read_json, write_atomically, write_json

LANGUAGE_CHARACTERS = 2000  # on real prose cut at 1000, the detector errs in less than 0.1 %
DEVIATIONS = 2.0  # arXiv:2509.00404, section 4: "more than two standard deviations from the mean"
# The first rule that a document fails drops it; docs/data.md explains the rules.
RULES = ("unreadable", "unicode", "empty", "language", "perplexity")
# White space among the control characters (tab, LF, VT, FF, CR, NEL) is text. Every plane ends in
# two noncharacters. Unassigned code points depend on the Unicode version and count as text.
NOT_TEXT = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffd"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)
SPLITS = {"validation": "validation", "train": "."}  # split -> folder
LIBRARIES = ("datasets", "numpy", "py3langid", "pyarrow", "tokenizers", "torch", "transformers")


def option(help: str, **more):
    return field(**more, metadata={"help": help})


@dataclass
class Arguments:
    out: str = option("Output directory for the shards; an interrupted run continues there.")
    tokenizer: str = option("Tokenizer of the model to train: a path or a hub name.")
    dataset: str = option("Hub name; streamed.", default="mlfoundations/dclm-baseline-1.0")
    dataset_config: str | None = option("Configuration name of the dataset.", default=None)
    dataset_split: str = option("Split of the dataset.", default="train")
    files: list[str] | None = field(default=None, metadata={"help":
        "Local files instead of --dataset: paths or glob patterns of one kind, .jsonl or .txt (one "
        "document per line or per file; also .gz, .zst, .xz, .bz2) or .parquet."})  # fmt: skip
    text_column: str = option("Column with the text; ignored for .txt files.", default="text")
    sequence_length: int = option("Sequence length in tokens.", default=4096)
    max_tokens: int | None = option(
        "Stop reading when this many tokens have passed the text filters.", default=None
    )
    validation_share: float = option("Share of documents, by hash, for validation/.", default=0.005)
    perplexity_filter: bool = option(
        "Drop documents whose perplexity is more than two standard deviations from the mean; "
        "--no-perplexity-filter keeps them.", default=True
    )  # fmt: skip
    reference_model: str = option(
        "Causal LM that measures perplexity: a path or a hub name.", default="Qwen/Qwen3-0.6B"
    )
    perplexity_tokens: int = option("Scored tokens at the start of a document.", default=1024)
    perplexity_batch_size: int = option("Documents per forward pass of that model.", default=8)
    documents_per_part: int = option("Documents that an interrupted run loses.", default=10_000)
    sequences_per_shard: int = option("Sequences per output file.", default=8192)
    num_proc: int = option("Number of processes that filter and tokenize.", default=1)

    def __post_init__(self):
        if self.files == []:
            raise ValueError("files is empty; give paths, or leave it out to read the dataset")
        for name, least in {
            "sequence_length": 2, "max_tokens": 1, "perplexity_tokens": 1, "num_proc": 1,
            "perplexity_batch_size": 1, "documents_per_part": 1, "sequences_per_shard": 1,
        }.items():  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}; choose at least {least}")
        if not 0 <= self.validation_share < 1:
            share = self.validation_share
            raise ValueError(f"validation_share={share}; choose at least 0 and less than 1")
        if "::" in os.path.abspath(self.out):
            raise ValueError(
                f"out={self.out!r}: datasets treats a path with '::' as a URL and could not load "
                "the output; choose another --out"
            )


# ---- text filters and tokens, a batch at a time in many processes -------------------------------


def judge(raw: bytes | None, json_column: str | None) -> tuple[str, str, str]:
    """Return a document's text, the first rule that it fails ("" if none) and its language."""
    if raw is None:
        return "", "unreadable", ""
    text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace")
    if json_column is not None:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            return "", "unreadable", ""
        text = row.get(json_column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            return "", "unreadable", ""
    if NOT_TEXT.search(text):
        return text, "unicode", ""
    if not text.strip():
        return text, "empty", ""
    language = classify(text[:LANGUAGE_CHARACTERS])[0]
    return text, "" if language == "en" else "language", language


def filter_and_tokenize(batch, tokenizer, key: str | None, share: float) -> dict:
    texts, reasons, languages = map(list, zip(*(judge(raw, key) for raw in batch["document"])))
    kept = [text for text, reason in zip(texts, reasons) if not reason]
    # split_special_tokens: an end-of-text token spelled out in a document is ordinary text.
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    encoded = iter(tokenizer(kept, **options)["input_ids"] if kept else [])
    ids = [[] if reason else [*next(encoded), tokenizer.eos_token_id] for reason in reasons]

    def held_out(text: str) -> bool:  # depends only on the text: equal documents share a split
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 < share

    return {
        "reason": reasons,
        "language": languages,
        "characters": [len(text) for text in texts],
        "text": ["" if reason else text for text, reason in zip(texts, reasons)],
        "input_ids": ids,
        "num_tokens": [len(each) for each in ids],
        "validation": [not r and held_out(text) for text, r in zip(texts, reasons)],
    }


KINDS = {"reason": "string", "language": "string", "characters": "int64", "text": "large_string",
         "num_tokens": "int64", "validation": "bool"}  # fmt: skip
FEATURES = datasets.Features(
    {"input_ids": datasets.LargeList(datasets.Value("int32"))}
    | {name: datasets.Value(kind) for name, kind in KINDS.items()}
)


# ---- ownership of the output directory -----------------------------------------------------------


def settings_of(a: Arguments) -> dict:
    """Return the settings that determine the output: arguments, digests of files, the device."""
    decides = {k: v for k, v in asdict(a).items() if k not in ("out", "num_proc")}
    read = [] if a.files is None else local_files(a.files)
    models = [a.tokenizer, *([a.reference_model] if a.perplexity_filter else [])]
    kinds = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "*.bin")
    contents = {}
    for folder in filter(os.path.isdir, models):  # a hub model is identified by its name
        files = sorted(path for kind in kinds for path in Path(folder).glob(kind))
        contents[folder] = digest(*((path.name, digest_of_path(path)) for path in files))
    contents |= {path: digest_of_path(Path(path)) for path in read}
    device = {"reference_device": device_type()} if a.perplexity_filter else {}
    return {"arguments": decides, "contents": contents, **device}


def check_owner(out: Path, settings: dict) -> None:
    """Refuse a directory that holds another preparation, or other files."""
    path = out / ARGUMENTS
    if not path.exists():
        if any(not each.name.startswith((".lock", f"{ARGUMENTS}.tmp")) for each in out.glob("*")):
            raise ValueError(
                f"{out} is not empty and contains no output of this recipe; choose a new "
                "directory as --out"
            )
        return
    there, now = flatten(read_json(path)), flatten(settings)
    differences = []
    for key in sorted({*there, *now}):
        name = key.partition(".")[2] or key
        if key.startswith("contents."):
            if key in there and key in now and there[key] != now[key]:
                differences.append(f"the contents of {name} have changed")
        elif there.get(key) != now.get(key):
            differences.append(f"{name} was {there.get(key)!r}, now {now.get(key)!r}")
    if differences:
        raise ValueError(
            f"{out} contains output from other settings: {'; '.join(differences)}. Run the recipe "
            "with those settings, delete the directory, or choose another --out"
        )


# ---- the source, part by part: a stopped run continues after the last complete part --------------


def read_parts(a: Arguments, source, json_column: str | None, tokenizer, work: Path) -> list[Path]:
    """Filter, tokenize and score the source; return one file per part."""
    work.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    documents, tokens, scorer = 0, 0, None
    while (path := work / f"part-{len(parts):05}.parquet").exists():
        counts = pq.read_table(path, columns=["num_tokens"])[0].to_numpy()
        documents, tokens = documents + len(counts), tokens + int(counts.sum())
        parts.append(path)
    if parts:
        source.load_state_dict(json.loads(pq.read_schema(parts[-1]).metadata[b"stream"]))
    batches = source.iter(batch_size=a.documents_per_part)
    options = {"tokenizer": tokenizer, "key": json_column, "share": a.validation_share}
    with tqdm(desc="reading", unit=" documents", initial=documents, unit_scale=True) as bar:
        while a.max_tokens is None or tokens < a.max_tokens:
            raw = next(batches, None)
            if raw is None:
                break
            column = raw.column(0).cast(pa.large_binary())
            mapped = datasets.Dataset(pa.table({"document": column})).map(
                filter_and_tokenize,
                fn_kwargs=options,
                batched=True,
                batch_size=256,
                num_proc=min(a.num_proc, len(raw)) if a.num_proc > 1 else None,
                remove_columns=["document"],
                features=FEATURES,
                keep_in_memory=True,
                new_fingerprint="part",  # skips hashing; nothing is cached
            )
            part = mapped.with_format("arrow")[:]
            if a.max_tokens is not None:  # keep up to the document that reaches the limit
                ends = np.cumsum(part["num_tokens"].to_numpy())
                part = part.slice(0, int(np.searchsorted(ends, a.max_tokens - tokens)) + 1)
            scores = np.full(len(part), np.nan)
            if a.perplexity_filter:
                limits = a.perplexity_tokens, a.perplexity_batch_size
                scorer = scorer or Scorer(a.reference_model, *limits)
                kept = np.flatnonzero(part["num_tokens"].to_numpy())
                scores[kept] = scorer.score(part["text"].take(kept).to_pylist())
            part = part.drop_columns(["text"]).append_column("score", pa.array(scores))
            part = part.replace_schema_metadata({"stream": json.dumps(source.state_dict())})
            path = work / f"part-{len(parts):05}.parquet"
            write_atomically(path, lambda file: pq.write_table(part, file, compression="zstd"))  # noqa: B023
            parts.append(path)
            tokens += int(part["num_tokens"].to_numpy().sum())
            bar.update(len(part))
    return parts


# ---- the outliers of perplexity, the report, the shards -----------------------------------------


def band(values: np.ndarray) -> tuple[np.ndarray, dict]:
    """Return a mask of the values to keep, and the band's numbers (population std)."""
    scored = values[np.isfinite(values)]
    mean, std = (float(scored.mean()), float(scored.std())) if scored.size else (np.nan, np.nan)
    lowest, highest = mean - DEVIATIONS * std, mean + DEVIATIONS * std
    high, low = values > highest, values < lowest
    numbers = {"mean": mean, "std": std, "lowest_kept": lowest, "highest_kept": highest,
               "too_high": int(high.sum()), "too_low": int(low.sum())}  # fmt: skip
    return np.isfinite(values) & ~high & ~low, numbers


def write(a: Arguments, settings: dict, tokenizer, parts: list[Path], out: Path) -> dict:
    """Write shards, report.json and, last, meta.json; return the report."""
    names = ["reason", "language", "characters", "num_tokens", "validation", "score"]
    tables = [pq.read_table(path, columns=names) for path in parts]
    ends = np.cumsum([len(table) for table in tables])[:-1]
    if not parts:
        raise ValueError(f"0 documents were read; give more text, and delete {out}")
    whole = pa.concat_tables(tables).to_pandas()
    characters, lengths = whole["characters"].to_numpy(), whole["num_tokens"].to_numpy()
    validation, reason = whole["validation"].to_numpy(), whole["reason"].to_numpy(copy=True)
    filters: dict = {name: {} for name in RULES}
    foreign = whole["language"][reason == "language"].value_counts()
    most_first = sorted(foreign.items(), key=lambda item: (-item[1], item[0]))
    filters["language"]["languages"] = {code: int(count) for code, count in most_first}
    if a.perplexity_filter:
        passed = np.flatnonzero(reason == "")
        log = whole["score"].to_numpy()[passed]
        keep, numbers = band(np.exp(log))
        reason[passed[~keep]] = "perplexity"
        on_log = {"on_log_perplexity": band(log)[1], "device": device_type()}
        filters["perplexity"] = numbers | on_log
    else:
        del filters["perplexity"]
    read = {"documents": len(whole), "characters": int(characters.sum())}
    for name, entry in filters.items():
        dropped = reason == name
        count, size = int(dropped.sum()), int(characters[dropped].sum())
        entry["dropped"] = {
            "documents": count,
            "characters": size,
            "example_rows": np.flatnonzero(dropped)[:5].tolist(),
            "share_of_documents": round(count / max(1, read["documents"]), 6),
            "share_of_characters": round(size / max(1, read["characters"]), 6),
        }
    kept = {split: (reason == "") & (validation == (split != "train")) for split in SPLITS}
    if (left := int(lengths[kept["train"]].sum())) < a.sequence_length:
        shown = ", ".join(f"{name} {f['dropped']['documents']}" for name, f in filters.items())
        raise ValueError(
            f"{len(whole)} documents were read, but only {left} training tokens are left, less "
            f"than one sequence of sequence_length={a.sequence_length}; documents dropped: "
            f"{shown}. Give more text, or a smaller sequence_length, and delete {out} or choose "
            "another --out"
        )
    report = {"read": read, "filters": filters, "train": {}, "validation": {}}
    for split, chosen in kept.items():
        masks = np.split(chosen, ends)
        counts = [int(each[m].sum()) for each, m in zip(np.split(lengths, ends), masks)]

        def tokens_of(part: int, masks=masks) -> np.ndarray:
            table = pq.read_table(parts[part], columns=["input_ids"]).filter(masks[part])
            return table["input_ids"].combine_chunks().flatten().to_numpy()

        with tqdm(
            desc=f"writing {split}", total=sum(counts) // a.sequence_length, unit=" seq"
        ) as bar:
            place, shard = out / SPLITS[split], a.sequences_per_shard
            rows = write_shards(place, tokens_of, counts, a.sequence_length, shard, bar.update)
        report[split] = {
            "documents": int(chosen.sum()),
            "characters": int(characters[chosen].sum()),
            "tokens": sum(counts),
            "sequences": rows,
            "chunked_tokens": rows * a.sequence_length,
            "tail_tokens_dropped": sum(counts) - rows * a.sequence_length,
        }
    versions = {name: version(name) for name in ("metis-hf", *LIBRARIES)}
    report |= {"arguments": settings["arguments"], "versions": versions}
    tokenizer.save_pretrained(out / TOKENIZER)  # the directory is all that training needs
    write_json(out / "report.json", report)
    for split in kept:  # train's meta.json comes last: it marks the directory as complete
        if rows := report[split]["sequences"]:
            meta = {
                "tokenizer": a.tokenizer,
                "seq_len": a.sequence_length,
                "num_sequences": rows,
                "num_tokens": rows * a.sequence_length,
                "vocab_size": len(tokenizer),
                "eos_token_id": tokenizer.eos_token_id,
                "source": a.files or a.dataset,
                "arguments": settings["arguments"],
            }
            write_json(out / SPLITS[split] / META, meta)
    return report


def prepare(a: Arguments) -> dict:
    out = Path(a.out)
    settings = settings_of(a)
    check_owner(out, settings)
    if (out / META).exists():  # finished before
        shutil.rmtree(out / "work", ignore_errors=True)
        return read_json(out / "report.json")
    # Refuse bad arguments before claiming the directory for them.
    tokenizer = AutoTokenizer.from_pretrained(a.tokenizer)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {a.tokenizer} has no eos_token; set one and save it")
    if a.perplexity_filter:
        check_reference(a.reference_model, a.perplexity_tokens)
    classify("")  # loads the detector's model before processes fork
    if a.files is not None:
        source, key = open_files(a.files, a.text_column)
    else:
        stream = datasets.load_dataset(
            a.dataset, name=a.dataset_config, split=a.dataset_split, streaming=True
        )
        source, key = text_of(stream, a.text_column, a.dataset), None
    with hold_directory(out, "--out"):
        check_owner(out, settings)  # another process may have used it since the first check
        write_json(out / ARGUMENTS, settings)
        datasets.disable_progress_bars()  # show one bar for all parts
        parts = read_parts(a, source, key, tokenizer, out / "work")
        report = write(a, settings, tokenizer, parts, out)
        shutil.rmtree(out / "work")
    return report


def main() -> None:
    with one_line_errors():
        (a,) = HfArgumentParser(Arguments, description=__doc__).parse_args_into_dataclasses()
        report = prepare(a)
    for name, entry in report["filters"].items():
        dropped, share = entry["dropped"]["documents"], entry["dropped"]["share_of_characters"]
        print(f"{name:<12} dropped {dropped:>9} documents, {100 * share:.2f} % of the characters")
    for split in SPLITS:
        count, rows = report[split]["documents"], report[split]["sequences"]
        print(f"{split:<12} {count} documents, {rows} sequences of {a.sequence_length} tokens")
    print(f"Written to {a.out}; report.json there has the details.")


if __name__ == "__main__":
    main()
