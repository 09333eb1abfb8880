"""Result files: one a checkpoint, precision and task, in lm-eval's shape with a `metis` part.

The name ends in a digest of everything that decides the numbers, so results of other settings stay
beside each other and a finished one is found again. A file is written whole or not at all.
`join_results` makes the row of a table from the files of its tasks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from metis_hf.config import MetisConfig
from metis_hf.lab.measured import code_digest
from metis_hf.shared.records import read_json, write_json

FOLDER = "results"
BATCH_SIZES = "batch_sizes.json"  # of an output directory
FORMAT_VERSION = 2  # 1 held all tasks of a row in one file


def settings_of(
    *,
    weights: str,
    tokenizer: str,
    precision: str,
    dtype: str,
    device: str,
    batch_size: int,
    limit: int | None,
    task: str,
    data: dict[str, str | None],
    conversion: MetisConfig | None = None,
    own_schemes: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return everything that decides the numbers of an evaluation.

    Args:
        weights: SHA-256 of config and weights.
        tokenizer: SHA-256 of what it encodes.
        precision: "scheme" or "dense".
        dtype: as asked.
        device: its kind, such as "cuda".
        batch_size: sequences per forward pass; a tensor scale spans the batch.
        limit: documents of the task, or None for all.
        task: its name.
        data: file name or task -> SHA-256 of the local data; None for data that lm-eval fetches.
        conversion: what a dense checkpoint was converted to, if it was.
        own_schemes: name -> SHA-256 of the source of schemes from outside this package.
    """
    optional: dict[str, Any] = {}  # where they say nothing, digests are those without them
    if conversion is not None:
        optional["conversion"] = conversion.to_dict()
    if own_schemes:
        optional["scheme_sha256"] = own_schemes
    return {
        **optional,
        "weights_sha256": weights,
        "tokenizer_sha256": tokenizer,
        "precision": precision,
        "dtype": dtype,
        "device": device,
        "batch_size": batch_size,
        "limit": limit,
        "task": task,
        "data_sha256": data,
        "versions": {name: version(name) for name in ("lm_eval", "metis-hf", "transformers")},
        "code_sha256": code_digest(),
    }


def result_path(out: Path, label: str, settings: dict[str, Any]) -> Path:
    """Return where the result of a task under these settings is or will be.

    One that is there under another label is taken: labels depend on what is evaluated beside it.
    """
    text = json.dumps(settings, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    own, task = (re.sub(r"[^\w.-]+", "-", part) for part in (label, settings["task"]))
    ending = f".{settings['precision']}.{task}.{digest}.json"
    path = out / FOLDER / f"{own}{ending}"
    if path.exists():
        return path
    others = (each for each in path.parent.glob("*.json") if each.name.endswith(ending))
    return min(others, default=path)


def known_batch_size(
    out: Path, models: str, choose: Callable[[], int], *, again: bool = False
) -> tuple[int, bool]:
    """Return the batch size that an evaluation had before, or choose one and remember it.

    Args:
        out: directory of the evaluation.
        models: digest of what is evaluated and of its device.
        choose: finds a size, which depends on the memory that is free now.
        again: choose whatever it was before.

    Returns:
        (sequences of a forward pass, whether that is an earlier choice).
    """
    path = out / BATCH_SIZES
    known: dict[str, int] = read_json(path) if path.is_file() else {}
    if models in known and not again:
        return known[models], True
    size = choose()
    write_json(path, known | {models: size})
    return size, False


def load_result(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return a finished result, or None if there is none.

    Raises:
        ValueError: the file is cut short, or is not the result that its name says.
    """
    if not path.exists():
        return None
    advice = "; delete it, or evaluate again with --overwrite"
    try:
        record = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}: half-written or damaged{advice}") from None
    if not isinstance(record, dict) or not {"results", "n-samples", "metis"} <= record.keys():
        raise ValueError(f"{path} is not a result of metis-hf eval{advice}")
    if record["metis"].get("settings") != settings:
        raise ValueError(
            f"{path} was edited: its settings are not those that its name says{advice}"
        )
    return record


def make_folder(out: Path) -> None:
    """Make the folder of result files.

    Raises:
        ValueError: `out` is a file, or cannot be made.
    """
    try:
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{out} cannot be written to ({error.strerror}); name a directory with --out"
        ) from None


def save_result(path: Path, record: dict[str, Any]) -> None:
    """Write a result."""
    write_json(path, record)


def join_results(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return results of one checkpoint's tasks as one record, which `table.compare` takes.

    Args:
        records: of the same checkpoint, precision and batch size; at least one.

    Returns:
        `results` and `higher_is_better` of all of lm-eval's tasks and groups, and under `metis` the
        first record's fields, with items and troubles of all, the loss of the one that has it, and
        `limits`: task -> items, or None for all.
    """
    ours = [record["metis"] for record in records]
    joined = {
        **ours[0],
        "limits": {one["settings"]["task"]: one["settings"]["limit"] for one in ours},
        "items": {task: items for one in ours for task, items in one["items"].items()},
        "nonfinite": {task: count for one in ours for task, count in one["nonfinite"].items()},
    }
    for name in ("truncated_requests", "truncated_tokens"):
        joined[name] = sum(one[name] for one in ours)
    for name in ("held_out_loss", "held_out_tokens"):
        joined[name] = next((one[name] for one in ours if one[name] is not None), None)
    of_all = {
        section: {name: found for record in records for name, found in record[section].items()}
        for section in ("results", "higher_is_better")
    }
    return {**of_all, "metis": joined}
