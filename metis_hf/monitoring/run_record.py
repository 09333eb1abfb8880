"""What MetisCallback leaves in a run's directory, for `metis-hf report` and for your own tools.

`metis_run.json` says what was run. `metis_health.jsonl` has a line for each step at which something
happened: {"step": n, "layers": {layer: {tensor: {statistic: value}}}, "noise": {layer: [gradient
norm, noise norm]}, "refresh": {layer: {"before": ..., "after": ...}}, "switch": {...}}, each part
only where there is one. NaN is written as NaN.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainingArguments

from metis_hf.layers.linear import MetisLayer
from metis_hf.shared.records import device_name, package_versions, write_json

HEALTH_FILE = "metis_health.jsonl"
RUN_FILE = "metis_run.json"


def describe_run(
    model: nn.Module, config: dict[str, Any] | None, args: TrainingArguments, max_steps: int
) -> dict[str, Any]:
    """What `metis_run.json` holds: model, config, conversion report, software and device.

    Args:
        model: the converted one.
        config: its MetisConfig as a dict.
        args: of the Trainer.
        max_steps: optimizer steps that the run is to make.
    """
    report = getattr(model, "metis_report", None)
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {
        "model": type(model).__name__,
        "config": config,
        "summary": None if report is None else str(report),
        "conversion": None if report is None else report.to_dict(),
        "max_steps": max_steps,
        "sequences_per_step": batch,
        "environment": {
            "versions": package_versions(),
            "python": platform.python_version(),
            "device": device_name(),
            "processes": args.world_size,
        },
    }


def write_run(directory: Path, description: dict[str, Any]) -> None:
    """Writes `metis_run.json`, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / RUN_FILE, description)


def append_record(directory: Path, step: int, parts: dict[str, Any]) -> None:
    """Adds one line to `metis_health.jsonl`."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / HEALTH_FILE).open("a") as file:
        file.write(json.dumps({"step": step, **parts}) + "\n")


def parse_records(text: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Records of a health file, and the numbers (from 1) of lines that are none.

    A killed process may leave half a line at the end.
    """
    records, broken = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, TypeError, KeyError):
            broken.append(number)
        else:
            records.append(record)
    return records, broken


def drop_after(directory: Path, step: int) -> None:
    """Removes records after `step`, which a resumed run writes again, and broken lines."""
    path = directory / HEALTH_FILE
    if not path.exists():
        return
    records, _ = parse_records(path.read_text())
    kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
    path.write_text("".join(kept))


def precision_of(layer: MetisLayer) -> dict[str, Any]:
    """What a precision schedule changes, as a record says it."""
    return {"scheme": layer.config.scheme, "high_precision": list(layer.config.high_precision)}
