"""The result of a run, and its record in the run's directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis_hf.lab.store import Store

if TYPE_CHECKING:
    from metis_hf.lab.evaluate import EvalResult

RECORD = "result"  # name of the record in the run directory's store
RESULT_FILE = f"{RECORD}.json"


@dataclass(frozen=True)
class SchemeResult:
    """The result of one variant with one seed."""

    scheme: str  # the variant's name
    config: dict[str, Any]  # its MetisConfig as a dict
    summary: str  # the conversion report, as text
    loss: float  # held-out loss, nats per token
    # Task -> {"metric", "value", "stderr", "share"}; "share" is whether the metric is a share of
    # right answers, and is missing (True) in results of earlier versions.
    tasks: dict[str, dict[str, Any]]
    seconds_per_step: float  # median over normal (not measured) steps
    history: list[dict[str, float]]  # Trainer's log entries, one per logged step
    seed: int = 0
    peak_memory: int = 0  # bytes above the use before the model was built
    parameters: int = 0  # of the model before the conversion
    precision_schedule: dict[str, Any] | None = None  # the variant's
    loss_dense: float | None = None  # held-out loss with the quantizers off; None if not measured
    machine: dict[str, str] | None = None  # "device", "precision"; None in earlier versions
    # "sha256" of numerics, torch and transformers, several joined by "+", and "commit"; None in
    # results of earlier versions.
    code: dict[str, str | None] | None = None


def load_result(run: Path) -> SchemeResult | None:
    """Return the result of a finished run, or None.

    Raises:
        ValueError: the file is damaged, or another version wrote it.
    """
    record = Store(run).find(RECORD)
    if record is None:
        return None
    # Earlier versions kept lm-eval's results too.
    values = {name: value for name, value in record.value.items() if name != "evaluation"}
    try:
        return SchemeResult(**values)
    except TypeError as error:
        raise ValueError(
            f"{run / RESULT_FILE} is not a result of this version ({error}); use the version of "
            "metis-hf that wrote it, or delete the file to train the run again"
        ) from None


def save_result(run: Path, result: SchemeResult, key: str) -> None:
    """Write the result of a run, which marks the run as finished."""
    Store(run).put(RECORD, key, asdict(result))


def compact(result: SchemeResult) -> dict[str, Any]:
    """Return a run's short record: a rounded curve, and no summary or health."""
    left_out = {"summary", "history"}
    left_out |= {name for name in ("machine", "code") if not getattr(result, name)}
    curve = {
        "step": [int(entry["step"]) for entry in result.history],
        "loss": [round(entry["loss"], 5) for entry in result.history],
    }
    values = asdict(result)
    return {name: values[name] for name in values if name not in left_out} | {"curve": curve}


def headlines(result: EvalResult, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return task -> {"metric", "value", "stderr", "share"} for the table."""
    from metis_hf.lab.evaluate.results import is_share

    found = {}
    better = result.harness.get("higher_is_better", {})
    for task in tasks:
        metric, value, stderr = result.headline(task)
        lower = better.get(task, {}).get(metric) is False
        share = is_share(value, lower_is_better=lower)
        found[task] = {"metric": metric, "value": value, "stderr": stderr, "share": share}
    return found
