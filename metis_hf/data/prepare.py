"""The pipeline: read and filter, measure perplexity, chunk; resumable, and equal however often.

Three stages leave their results in `work/`, one file per part of the source. Each file is renamed
into place when it is whole, so that a run which was killed goes on with the next file, and every
file is a function of the source and the arguments alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.utils import logging

from metis_hf.data.arguments import PrepareArguments
from metis_hf.data.chunked import (
    ARGUMENTS,
    META,
    TOKENIZER,
    write_shards,
)
from metis_hf.data.filters import KEPT, TextFilter, detector
from metis_hf.data.ownership import check_owner, settings_of
from metis_hf.data.perplexity import Outliers, Scorer, check_reference, device_type
from metis_hf.data.report import Tally, build_report
from metis_hf.data.source import Opened, open_source
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.records import read_json, write_atomically, write_json

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)

_LIBRARIES = ("datasets", "numpy", "py3langid", "pyarrow", "tokenizers", "torch", "transformers")
_MAP_BATCH = 256  # documents per call of the filter
_VALIDATION = "validation"
_READ = "finished.json"  # of the folder of parts, when the source has been read to its end


def prepare(arguments: PrepareArguments) -> dict[str, Any]:
    """Turn a source of documents into chunked sequences.

    Run again with the same arguments after an interruption, it continues; after the end, it only
    returns the report.

    Returns:
        The content of `report.json`.

    Raises:
        OSError, ValueError, ImportError: If the source cannot be read, the output directory
            belongs to something else, to a run with other arguments or to a process that is
            running, the tokenizer has no end-of-text token, the reference model is unusable, or
            nothing is left to write.
    """
    output = Path(arguments.output_dir)
    if "::" in str(output.absolute()):
        raise ValueError(
            f"output_dir={arguments.output_dir!r}: datasets takes a path with '::' for a URL, and "
            "could not load what is written there; choose another --output-dir"
        )
    settings = settings_of(arguments)
    check_owner(output, settings)
    work = output / "work"
    documents = work / "documents"
    if (output / META).exists():
        shutil.rmtree(work, ignore_errors=True)
        return read_json(output / "report.json")
    # What can be refused is refused before the directory is claimed for these arguments.
    tokenizer = _load_tokenizer(arguments.tokenizer)
    if arguments.perplexity_filter:
        check_reference(arguments.reference_model, arguments.perplexity_tokens)
    opened = None if (documents / _READ).exists() else open_source(arguments)
    with hold_directory(output, "--output-dir"):
        check_owner(output, settings)  # as another process may have left it since
        write_json(output / ARGUMENTS, settings)
        tallies = _read_stage(arguments, opened, tokenizer, documents)
        if arguments.perplexity_filter:
            _score_stage(arguments, tallies, work)
        report = _write_stage(arguments, tokenizer, tallies, output)
        shutil.rmtree(work)
    return report


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {name} has no eos_token to put between documents; set one and save it"
        )
    return tokenizer


def _read_stage(
    arguments: PrepareArguments,
    opened: Opened | None,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> list[Tally]:
    """Read, filter and tokenize the source, one part at a time; a tally is a part's marker.

    Args:
        arguments: of the preparation.
        opened: the source at its beginning; None where all of it has been read.
        tokenizer: of the model to train.
        folder: of the parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tallies: list[Tally] = []
    while (marker := folder / f"part-{len(tallies):05}.json").exists():
        tallies.append(Tally.from_json(read_json(marker)))
    if opened is None:
        return tallies
    if tallies:
        opened.dataset.load_state_dict(tallies[-1].stream)
    detector()  # or its package is missing; processes that are forked inherit it
    text_filter = TextFilter(
        tokenizer, opened.json_column, arguments.validation_share, arguments.perplexity_filter
    )
    with _progress("reading", None, "documents", sum(t.documents for t in tallies)) as update:
        for tally, kept in _parts(arguments, opened, text_filter, tallies):
            name = f"part-{len(tallies):05}"
            write_atomically(folder / f"{name}.parquet", lambda f: _write_table(f, kept))  # noqa: B023
            write_json(folder / f"{name}.json", tally.to_json())
            tallies.append(tally)
            update(tally.documents)
    write_json(folder / _READ, {"parts": len(tallies)})
    return tallies


def _parts(
    arguments: PrepareArguments, opened: Opened, text_filter: TextFilter, done: list[Tally]
) -> Iterator[tuple[Tally, pa.Table]]:
    row, tokens = sum(t.documents for t in done), sum(t.tokens for t in done)
    limit = arguments.max_tokens
    if limit is not None and tokens >= limit:
        return
    for raw in opened.batches(arguments.documents_per_part):
        table = _apply(text_filter, raw, arguments.num_proc)
        if limit is not None:
            table = table.slice(0, _rows_until(table["num_tokens"].to_numpy(), limit - tokens))
        tally = Tally.of(table, row, opened.dataset.state_dict())
        numbered = table.append_column("row", [np.arange(row, row + len(table))])
        kept = numbered.filter(np.asarray(table["reason"].to_pylist(), dtype=object) == KEPT)
        yield tally, kept.drop_columns(["reason", "language"])
        row, tokens = row + tally.documents, tokens + tally.tokens
        if limit is not None and tokens >= limit:
            return


def _rows_until(tokens: np.ndarray, limit: int) -> int:
    """Return how many rows it takes to reach `limit` tokens; all rows if they do not."""
    return min(int(np.searchsorted(np.cumsum(tokens), limit)) + 1, len(tokens))


def _apply(text_filter: TextFilter, raw: list[bytes | None], num_proc: int) -> pa.Table:
    import datasets
    import pyarrow as pa
    from datasets import Value

    dataset = datasets.Dataset(pa.table({"document": pa.array(raw, pa.large_binary())}))
    processes = min(num_proc, len(raw))
    features = {
        "reason": Value("string"),
        "language": Value("string"),
        "characters": Value("int64"),
        "text": Value("large_string"),
        "input_ids": datasets.LargeList(Value("int32")),
        "num_tokens": Value("int64"),
        "validation": Value("bool"),
    }
    with _without_bars():  # one for the whole stage says more than one per part
        result = dataset.map(
            text_filter,
            batched=True,
            batch_size=_MAP_BATCH,
            num_proc=processes if processes > 1 else None,
            remove_columns=["document"],
            features=datasets.Features(features),
            keep_in_memory=True,
            new_fingerprint="part",  # nothing is cached, so nothing needs a hash
        )
    return result.with_format("arrow")[:]


def _score_stage(arguments: PrepareArguments, tallies: list[Tally], work: Path) -> None:
    """Measure the documents of every part that has not been measured."""
    folder = work / "perplexity"
    folder.mkdir(exist_ok=True)
    kept = [tally.kept for tally in tallies]
    missing = [i for i in range(len(tallies)) if not _scores(work, i).exists()]
    if not missing:
        return
    scorer = Scorer(
        arguments.reference_model, arguments.perplexity_tokens, arguments.perplexity_batch_size
    )
    done = sum(kept) - sum(kept[i] for i in missing)
    with _progress("perplexity", sum(kept), "documents", done) as update:
        for i in missing:
            texts = _read_table(work, i, ["text"])["text"].to_pylist()
            scores = scorer.score(texts, update)
            write_atomically(_scores(work, i), lambda f: np.save(f, scores))  # noqa: B023


def _write_stage(
    arguments: PrepareArguments,
    tokenizer: PreTrainedTokenizerBase,
    tallies: list[Tally],
    output: Path,
) -> dict[str, Any]:
    """Choose the documents by perplexity, write the shards, then report.json and meta.json."""
    work = output / "work"
    tables = [
        _read_table(work, i, ["row", "characters", "num_tokens", "validation"])
        for i in range(len(tallies))
    ]
    scores, outliers = None, None
    if arguments.perplexity_filter:
        scores = np.concatenate([np.load(_scores(work, i)) for i in range(len(tallies))] or [[]])
        outliers = Outliers.of(np.exp(scores))
    report = build_report(tallies, tables, scores, outliers)
    report |= {"arguments": arguments.in_result(), "versions": _versions()}
    if outliers is not None:
        report["filters"]["perplexity"]["device"] = device_type()
    ends = np.cumsum([len(table) for table in tables])[:-1]
    keep = np.ones(sum(map(len, tables)), bool) if outliers is None else outliers.keep
    masks = np.split(keep, ends) if tables else []
    _check_not_empty(report, arguments)
    for split, folder in ((True, output / _VALIDATION), (False, output)):
        _write_split(arguments, tokenizer, tables, masks, work, split, folder, report)
    tokenizer.save_pretrained(output / TOKENIZER)  # the directory is all that training needs
    write_json(output / "report.json", report)
    write_json(output / META, _meta(arguments, tokenizer, report["train"]))
    return report


def _write_split(
    arguments: PrepareArguments,
    tokenizer: PreTrainedTokenizerBase,
    tables: list[pa.Table],
    masks: list[np.ndarray],
    work: Path,
    validation: bool,
    folder: Path,
    report: dict[str, Any],
) -> None:
    chosen = [m & (t["validation"].to_numpy() == validation) for m, t in zip(masks, tables)]
    counts = [int(t["num_tokens"].to_numpy()[c].sum()) for t, c in zip(tables, chosen)]

    def tokens(i: int) -> np.ndarray:
        kept = _read_table(work, i, ["input_ids"]).filter(chosen[i])["input_ids"]
        return kept.combine_chunks().flatten().to_numpy()

    name = _VALIDATION if validation else "train"
    total = sum(counts) // arguments.seq_len
    with _progress(f"writing {name}", total, "sequences", 0) as update:
        sequences = write_shards(
            folder, tokens, counts, arguments.seq_len, arguments.sequences_per_shard, update
        )
    chunked = sequences * arguments.seq_len
    report[name] |= {
        "tokens": sum(counts),
        "sequences": sequences,
        "chunked_tokens": chunked,
        "tail_tokens_dropped": sum(counts) - chunked,
    }
    if validation and not sequences and arguments.validation_share:
        logger.warning(
            f"validation_share={arguments.validation_share} holds out {sum(counts)} tokens, less "
            f"than one sequence of {arguments.seq_len}: there is no {folder}"
        )
    if validation and sequences:
        write_json(folder / META, _meta(arguments, tokenizer, report[name]))


def _check_not_empty(report: dict[str, Any], arguments: PrepareArguments) -> None:
    tokens = report["train"]["tokens"]
    if tokens < arguments.seq_len:
        dropped = {k: f["dropped"]["documents"] for k, f in report["filters"].items()}
        shown = ", ".join(f"{name} {count}" for name, count in dropped.items())
        raise ValueError(
            f"{report['read']['documents']} documents were read and {tokens} training tokens are "
            f"left, less than one sequence of seq_len={arguments.seq_len}; documents dropped: "
            f"{shown}. Give more text, or a smaller seq_len, and delete {arguments.output_dir} or "
            "choose another --output-dir"
        )


def _meta(
    arguments: PrepareArguments, tokenizer: PreTrainedTokenizerBase, split: dict[str, Any]
) -> dict[str, Any]:
    return {
        "tokenizer": arguments.tokenizer,
        "seq_len": arguments.seq_len,
        "num_sequences": split["sequences"],
        "num_tokens": split["chunked_tokens"],
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "source": arguments.files or arguments.dataset,
        "arguments": arguments.in_result(),
    }


def _versions() -> dict[str, str]:
    return {"metis-hf": version("metis-hf"), **{name: version(name) for name in _LIBRARIES}}


def _scores(work: Path, part: int) -> Path:
    return work / "perplexity" / f"part-{part:05}.npy"


def _read_table(work: Path, part: int, columns: list[str]) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(work / "documents" / f"part-{part:05}.parquet", columns=columns)


def _write_table(file: Any, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, file, compression="zstd")


@contextmanager
def _progress(stage: str, total: int | None, unit: str, done: int) -> Iterator[Any]:
    import datasets
    from tqdm.auto import tqdm

    hidden = datasets.are_progress_bars_disabled()
    with tqdm(
        desc=stage, total=total, initial=done, unit=f" {unit}", unit_scale=True, disable=hidden
    ) as bar:
        yield bar.update


@contextmanager
def _without_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
