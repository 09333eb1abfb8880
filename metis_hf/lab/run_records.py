"""Reads the files that MetisCallback wrote into a run's directory, even if they are damaged.

Missing data stays empty. A broken record is left out, and a note names it. NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from metis_hf.config import MetisConfig
from metis_hf.schemes import Role, build_scheme
from metis_hf.shared.checkpoints import refuse_link
from metis_hf.shared.messages import some
from metis_hf.shared.records import read_json
from metis_hf.training.gradient_noise import Crossing, GradientNoise, find_crossing, noise_ratios
from metis_hf.training.health import nonfinite_layers
from metis_hf.training.run_record import HEALTH_FILE, LOG_FILE, RUN_FILE, parse_records

_LARGEST = 3.5e38  # just above fp32's largest finite number
_SHOWN_FAULTS = 6  # faults that a note lists per file; it counts the rest
LayerStats = dict[str, dict[str, dict[str, float]]]  # layer -> tensor -> statistic -> value


@dataclass
class RunRecord:
    """One run, read from its files; fields without data are empty or None."""

    path: Path  # the run's directory
    name: str = ""  # its scheme, or its directory's name
    model: str = ""  # class of the model
    config: dict[str, Any] = field(default_factory=dict)  # MetisConfig.to_dict()
    conversion: dict[str, Any] = field(default_factory=dict)  # ConversionReport.to_dict()
    summary: str = ""  # the conversion report as text
    environment: dict[str, Any] = field(default_factory=dict)  # versions and device
    max_steps: int | None = None  # as planned
    log: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> Trainer's entries
    layers: dict[int, LayerStats] = field(default_factory=dict)  # by measured step
    noise: dict[int, dict[str, GradientNoise]] = field(default_factory=dict)  # step -> layer
    # Step -> layer -> "before" and "after" -> statistic -> value; empty where nothing was measured.
    refreshes: dict[int, LayerStats] = field(default_factory=dict)
    switches: dict[int, dict[str, Any]] = field(default_factory=dict)  # step -> precision
    notes: list[str] = field(default_factory=list)  # faults of the files

    @property
    def last_step(self) -> int:
        """The last step in any record."""
        parts = (self.log, self.layers, self.noise, self.refreshes, self.switches)
        return max((step for part in parts for step in part), default=0)

    @property
    def quantized(self) -> bool:
        """True if the config quantizes anything, or cannot be read."""
        try:
            scheme = build_scheme(MetisConfig.from_dict(self.config), 256, 256)
        except (TypeError, ValueError):
            return bool(self.config)
        return any(scheme.resolve(role)[1].quantizer is not None for role in Role)

    @property
    def fp4_share(self) -> float | None:
        """Share of the model's GEMM FLOPs in quantized layers, 0 to 1; None if unknown."""
        share = self.conversion.get("flops_share")
        if not self.quantized:
            return 0.0
        return float(share) if isinstance(share, int | float) else None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of one logged number."""
        found = {step: entry[name] for step, entry in self.log.items() if name in entry}
        return list(found), list(found.values())

    def noise_series(self) -> tuple[list[int], list[float]]:
        """Return (steps, |G| / (sqrt(3) noise)) of all layers together."""
        measured = {step: noise_ratios(layers) for step, layers in self.noise.items()}
        found = {step: each["noise/ratio"] for step, each in measured.items() if each}
        return list(found), list(found.values())

    def crossing(self) -> Crossing | None:
        """Return the step from which |G| stays below sqrt(3) noise; None if not measured."""
        steps, ratios = self.noise_series()
        return find_crossing(steps, ratios) if steps else None

    def not_finite(self) -> dict[int, list[str]]:
        """Return step -> names of logged numbers and of tensors with NaN or infinity."""
        found: dict[int, list[str]] = {}
        for step, entry in self.log.items():
            bad = [name for name in entry if name in ("loss", "grad_norm") or "eval" in name]
            bad = [name for name in bad if not math.isfinite(entry[name])]
            found[step] = [f"{name} is {entry[name]}" for name in bad]
        for step, layers in self.layers.items():
            found[step] = found.get(step, []) + nonfinite_layers(layers)
        return {step: found[step] for step in sorted(found) if found[step]}


def read_run(path: Path) -> RunRecord:
    """Read a run's directory: a Trainer's output_dir, or a run of a comparison.

    Raises:
        FileNotFoundError: no such directory, or no record of a run in it; the message names the
            files that were looked for, and the runs in folders below.
        ValueError: a record is a link out of the directory.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give the output_dir of a run")
    for name in (RUN_FILE, LOG_FILE, HEALTH_FILE):
        refuse_link(path / name, path)
    run = RunRecord(path)
    _read_description(run)
    log, health = _read_lines(run, LOG_FILE), _read_lines(run, HEALTH_FILE)
    if log is None and health is None:
        raise FileNotFoundError(_nothing_found(run))
    _take_log(run, log or {})
    _take_health(run, health or {})
    run.name = str(run.config.get("scheme") or path.resolve().name)
    if not run.series("loss")[0]:
        run.notes.append(
            f"No training loss: {LOG_FILE} contains none. Trainer logs a loss every logging_steps "
            "(default: 500), and MetisCallback records it."
        )
    if not run.layers:
        run.notes.append(
            f"No spectral health: {HEALTH_FILE} was not found or contains no measurement. "
            "MetisCallback(health_interval=...) records it."
        )
    return run


def read_runs(paths: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
    """Return (runs, a sentence per path that was left out); duplicate paths are read once.

    Raises:
        FileNotFoundError: none of them has a record.
    """
    runs, left_out = [], []
    unique = {path.resolve(): path for path in paths}
    for path in unique.values():
        try:
            runs.append(read_run(path))
        except FileNotFoundError as error:
            if len(unique) == 1:
                raise
            left_out.append(f"{path} was left out: {error}.")
    if not runs:
        raise FileNotFoundError("none of the runs has a record. " + " ".join(left_out))
    return runs, left_out


def _nothing_found(run: RunRecord) -> str:
    message = f"{run.path} has no record of a run; looked for {LOG_FILE}, {HEALTH_FILE}"
    if run.notes:
        message += f". {' '.join(run.notes)}"
    places = [f"{at}/{name}" for at in ("*", "runs/*/*") for name in (LOG_FILE, HEALTH_FILE)]
    files = [file for place in places for file in run.path.glob(place)]
    inside = sorted({file.parent.relative_to(run.path).as_posix() for file in files})
    if inside:
        message += f". It contains the runs {', '.join(inside)}; give one or more of them"
    return message


class _Malformed(ValueError):
    """A malformed record, which is left out; the message names the fault."""


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Malformed(f"{what} is {_shown(value)}, not a number")
    if (isinstance(value, int) or math.isfinite(value)) and abs(value) > _LARGEST:
        raise _Malformed(f"{what} is beyond the range of fp32")
    return value


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _Malformed(f"{what} is {_shown(value)}, not an object")
    return value


def _numbers(value: Any, what: str) -> dict[str, float]:
    return {key: _number(each, f"{what}, {key}") for key, each in _object(value, what).items()}


def _tensors(value: Any, what: str) -> dict[str, dict[str, float]]:
    return {key: _numbers(each, f"{what}, {key}") for key, each in _object(value, what).items()}


def _norms(value: Any, what: str) -> GradientNoise:
    if not isinstance(value, list) or len(value) != 2:
        raise _Malformed(f"{what} is {_shown(value)}, not a pair of norms")
    gradient, noise = (_number(norm, what) for norm in value)
    if gradient < 0 or noise <= 0:
        raise _Malformed(f"{what} is {_shown(value)}, with a negative norm or no noise")
    return GradientNoise(gradient, noise)


def _moments(value: Any, what: str) -> dict[str, dict[str, float]]:
    moments = _tensors(value, what)
    if moments and not all("orthogonality" in moments.get(m, {}) for m in ("before", "after")):
        raise _Malformed(f"{what} lacks the orthogonality before or after the refresh")
    return moments


def _by_layer(value: Any, check: Callable[[Any, str], Any]) -> dict[str, Any]:
    found = {layer: check(each, layer) for layer, each in _object(value, "it").items()}
    if not found:
        raise _Malformed("it has no layers")
    return found


def _switch(value: Any) -> dict[str, Any]:
    passes = _object(value, "it").get("high_precision") or []
    if not isinstance(passes, list) or not all(isinstance(name, str) for name in passes):
        raise _Malformed(f"high_precision is {_shown(passes)}, not a list of names")
    return value


def _shown(value: Any) -> str:
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."


def _note_faults(run: RunRecord, file: str, faults: Mapping[str, str]) -> None:
    if faults:
        shown = some([f"{place} ({fault})" for place, fault in faults.items()], _SHOWN_FAULTS)
        run.notes.append(f"{file}: left out {shown}.")


def _read_lines(run: RunRecord, name: str) -> dict[int, dict[str, Any]] | None:
    """Return line number -> record, and note broken lines; None if the file cannot be read."""
    try:
        data = (run.path / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        run.notes.append(f"{name} cannot be read ({error.strerror}) and was left out.")
        return None
    records, faults = parse_records(data)
    last = max([*records, *faults], default=0)
    if last in faults and not data.endswith(b"\n"):
        del faults[last]
        run.notes.append(
            f"{name}: line {last} is incomplete, probably because the run was killed, and was "
            "left out."
        )
    _note_faults(run, name, {f"line {number}": fault for number, fault in faults.items()})
    return records


def _take_log(run: RunRecord, records: Mapping[int, dict[str, Any]]) -> None:
    """Merge the log entries of each step; the later one wins if a resumed run logged twice."""
    faults, found = {}, {}
    for number, record in records.items():
        try:
            entry = {key: value for key, value in record.items() if key != "step"}
            found[number] = _numbers(entry, "the entry")
        except _Malformed as error:
            faults[f"line {number}"] = str(error).removeprefix("the entry, ")
    for number in sorted(found, key=lambda number: records[number]["step"]):
        run.log.setdefault(records[number]["step"], {}).update(found[number])
    _note_faults(run, LOG_FILE, faults)


def _take_health(run: RunRecord, records: Mapping[int, dict[str, Any]]) -> None:
    """Sort the parts of the records into the run; if a step occurs twice, the later one wins."""
    checks: dict[str, tuple[Callable[[Any], Any], dict[int, Any]]] = {
        "layers": (partial(_by_layer, check=_tensors), run.layers),
        "noise": (partial(_by_layer, check=_norms), run.noise),
        "refresh": (partial(_by_layer, check=_moments), run.refreshes),
        "switch": (_switch, run.switches),
    }
    faults: dict[str, str] = {}
    for number, record in sorted(records.items(), key=lambda item: item[1]["step"]):
        for part, (check, found) in checks.items():
            if part in record:
                try:
                    found[record["step"]] = check(record[part])
                except _Malformed as error:
                    faults[f"{part} in line {number}"] = str(error)
    _note_faults(run, HEALTH_FILE, faults)
    last = None
    for step, switch in list(run.switches.items()):
        if switch == last:  # repeated by a resumed run at its first step
            del run.switches[step]
        last = switch


def _read_description(run: RunRecord) -> None:
    """Read `metis_run.json`."""
    try:
        data = read_json(run.path / RUN_FILE)
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict):
        run.notes.append(f"{RUN_FILE} is incomplete or not a JSON object and was left out.")
        return
    for name in ("config", "conversion", "environment", "model", "summary", "max_steps"):
        kind = {"model": str, "summary": str, "max_steps": int}.get(name, dict)
        value = data.get(name)
        if isinstance(value, kind):
            setattr(run, name, value)
        elif value is not None:
            run.notes.append(f"{RUN_FILE}: {name} is {_shown(value)} and was left out.")
