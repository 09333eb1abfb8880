"""Files that MetisCallback writes to a run's directory, for `metis-hf report` and other tools.

`metis_run.json` describes the run. `metis_log.jsonl` has Trainer's log entries, one per line.
`metis_health.jsonl` has one line per step with a measurement, refresh or switch: {"step": n,
"layers": {layer: {tensor: {statistic: value}}}, "noise": {layer: [gradient norm, noise norm]},
"refresh": {layer: {"before": ..., "after": ...}}, "switch": {...}}; parts that do not apply are
left out. NaN is written as NaN. Readers skip lines that are not records.
"""

from __future__ import annotations

import json
import numbers
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState, TrainingArguments

from metis_hf.config import MetisConfig
from metis_hf.shared.records import device_name, package_versions, write_atomically, write_json

HEALTH_FILE = "metis_health.jsonl"
LOG_FILE = "metis_log.jsonl"
RUN_FILE = "metis_run.json"
LAST_STEP = 10**12  # largest valid step in a record


def describe_run(
    model: nn.Module,
    config: Mapping[str, Any] | None,
    args: TrainingArguments,
    state: TrainerState,
) -> dict[str, Any]:
    """Return the content of `metis_run.json`: model, config, report, software and device.

    `config` is the model's MetisConfig as a dict.
    """
    report = getattr(model, "metis_report", None)
    found = args.auto_find_batch_size and state.train_batch_size
    batch = (found or args.train_batch_size) * args.gradient_accumulation_steps * args.world_size
    return {
        "model": type(model).__name__,
        "config": config,
        "summary": None if report is None else str(report),
        "conversion": None if report is None else report.to_dict(),
        "max_steps": state.max_steps,
        "began_at": state.global_step,
        "sequences_per_step": batch,
        "environment": {
            "versions": package_versions(),
            "python": platform.python_version(),
            "device": device_name(args.device),
            "processes": args.world_size,
        },
    }


def write_run(directory: Path, description: dict[str, Any]) -> None:
    """Write `metis_run.json` atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / RUN_FILE, description)


def append_record(directory: Path, step: int, parts: Mapping[str, Any]) -> None:
    """Append one line to `metis_health.jsonl`."""
    _append(directory / HEALTH_FILE, {"step": step, **parts})


def append_log(directory: Path, entry: Mapping[str, Any]) -> None:
    """Append the numeric values of a Trainer log entry to `metis_log.jsonl`."""
    found = {key: value for key, value in entry.items() if isinstance(value, numbers.Real)}
    _append(
        directory / LOG_FILE,
        {key: v if isinstance(v, int | float) else float(v) for key, v in found.items()},
    )


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record) + "\n").encode()
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        # Start a new line if a killed process left an incomplete one.
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + line)


def is_step(value: Any) -> bool:
    """Return whether a value from a JSON file is a valid optimizer step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LAST_STEP


def parse_records(data: bytes) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Parse a file of records: one JSON object with a step per line.

    Returns:
        (line number from 1 -> record, line number -> fault of a line that is not a record). Empty
        lines are in neither. Faults come from killed processes and broken disks.
    """
    records, faults = {}, {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError:
            faults[number] = "a byte that is not UTF-8"
        except (ValueError, RecursionError):
            faults[number] = "not valid JSON"
        else:
            if not isinstance(record, dict):
                faults[number] = "not a JSON object"
            elif not is_step(record.get("step")):
                faults[number] = "no step, which must be a whole number >= 0"
            else:
                records[number] = record
    return records, faults


def drop_after(directory: Path, step: int) -> None:
    """Remove broken lines and the records after `step`, which a resumed run writes again.

    A step of -1 removes all records, including an evaluation at step 0. Each file is replaced
    atomically, so that a killed process loses no record.
    """
    for name in (HEALTH_FILE, LOG_FILE):
        path = directory / name
        if not path.exists():
            continue
        data = path.read_bytes()
        records, _ = parse_records(data)
        lines = data.split(b"\n")
        kept = [lines[number - 1] + b"\n" for number, r in records.items() if r["step"] <= step]
        write_atomically(path, lambda file: file.writelines(kept))  # noqa: B023


def precision_of(config: MetisConfig, resumed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that a precision schedule changes, in the form of a record.

    Args:
        config: of a layer.
        resumed: config of the checkpoint that the run resumes from; its settings take precedence.
    """
    scheme, high = config.scheme, config.high_precision
    if resumed is not None:
        high = resumed.get("high_precision") or ()
        scheme = scheme if resumed.get("scheme_pattern") else resumed.get("scheme", scheme)
    return {"scheme": scheme, "high_precision": list(high)}
