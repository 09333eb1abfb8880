"""Finds and reads the records of one run, whatever state the run was left in.

What is missing is missing on the page; what is broken is left out and noted. Figures are never
repaired: NaN stays NaN.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metis_hf.monitoring.gradient_noise import GradientNoise, noise_ratios
from metis_hf.monitoring.health import nonfinite_layers
from metis_hf.monitoring.run_record import HEALTH_FILE, RUN_FILE, parse_records
from metis_hf.shared.checkpoints import STATE_FILE, last_checkpoint, state_damage
from metis_hf.shared.records import SETTINGS_FILE

RESULT_FILE = "result.json"
# What Trainer logs at the end of a run: one entry of the whole run, not of a step.
_END = "train_runtime"

LayerStats = dict[str, dict[str, dict[str, float]]]  # layer -> tensor -> statistic -> value


@dataclass
class RunRecord:
    """One run as its files tell it.

    Attributes:
        path: its directory.
        name: what a picture calls it: the scheme, or the directory where no config was found.
        config: its MetisConfig as a dict; empty where none was found.
        summary: the conversion report.
        environment: versions and device.
        model: class of the model.
        history: one log entry with a loss for each logged step, ascending.
        evaluations: log entries with an `eval_loss`.
        layers: measured step -> statistics of each layer.
        noise: measured step -> layer -> norms of the weight gradient and of the noise in it.
        refreshes: step -> layer -> "before" and "after" -> statistic -> value.
        switches: step -> what the precision was switched to.
        max_steps: that the run was to make; None where unknown.
        tokens: seen in training; None where unknown.
        runtime: seconds; None where unknown.
        notes: what was wrong with the files.
    """

    path: Path
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    layers: dict[int, LayerStats] = field(default_factory=dict)
    noise: dict[int, dict[str, GradientNoise]] = field(default_factory=dict)
    refreshes: dict[int, LayerStats] = field(default_factory=dict)
    switches: dict[int, dict[str, Any]] = field(default_factory=dict)
    max_steps: int | None = None
    tokens: int | None = None
    runtime: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step of which anything is known."""
        logged = [int(entry["step"]) for entry in self.history]
        return max([*logged, *self.layers, *self.refreshes], default=0)

    @property
    def quantized(self) -> bool:
        """Whether any tensor was measured on its way through a quantizer."""
        return any(
            "sqnr_db" in stats
            for layers in self.layers.values()
            for tensors in layers.values()
            for stats in tensors.values()
        )

    @property
    def fp4_share(self) -> float | None:
        """Share of the GEMM FLOPs in converted layers, 0 to 1; 0 where none is quantized."""
        if self.layers and not self.quantized:
            return 0.0
        found = re.search(r"([\d.]+)% of GEMM FLOPs", self.summary)
        return float(found[1]) / 100 if found else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median over steps that were not measured, else the mean of the whole run."""
        timed = [entry for entry in self.history if "step_seconds" in entry]
        normal = [e["step_seconds"] for e in timed if "metis/nonfinite_tensors" not in e]
        if timed:
            return statistics.median(normal or [e["step_seconds"] for e in timed])
        return self.runtime / self.last_step if self.runtime and self.last_step else None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one figure of the log, where it was logged."""
        entries = [entry for entry in self.history if entry.get(name) is not None]
        return [int(e["step"]) for e in entries], [float(e[name]) for e in entries]

    def noise_series(self) -> dict[str, tuple[list[int], list[float]]]:
        """(steps, |G| / (sqrt(3) noise)) for "all" layers together, then for each group."""
        found: dict[str, tuple[list[int], list[float]]] = {"all": ([], [])}
        order = {
            name: place for layers in self.layers.values() for place, name in enumerate(layers)
        }
        for step, per_layer in self.noise.items():
            by_place = sorted(per_layer, key=lambda name: order.get(name, 0))
            for key, value in noise_ratios({name: per_layer[name] for name in by_place}).items():
                parts = key.split("/")
                steps, values = found.setdefault(parts[1] if len(parts) == 3 else "all", ([], []))
                steps.append(step)
                values.append(value)
        return found if found["all"][0] else {}


def read_run(path: Path) -> RunRecord:
    """Reads a run's directory: a Trainer's output_dir, or a scheme's of an experiment.

    Raises:
        FileNotFoundError: no such directory, or no record of a run in it; the message names the
            files that were looked for.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no directory; give the output_dir of a run")
    run = RunRecord(path)
    found = [_read_result(run), _read_state(run), _read_health(run)]
    if not any(found):
        raise FileNotFoundError(_nothing_found(run))
    _one_entry_a_step(run)
    _read_description(run)
    run.name = str(run.config.get("scheme") or path.resolve().name)
    if not run.history:
        run.notes.append(
            f"No losses: neither {STATE_FILE}, which Trainer writes into every checkpoint and at "
            f"trainer.save_state(), nor {RESULT_FILE} was found."
        )
    if not run.layers:
        run.notes.append(
            f"No spectral health: {HEALTH_FILE} was not found or holds no measurement. "
            "MetisCallback(health_interval=...) writes it."
        )
    return run


def _nothing_found(run: RunRecord) -> str:
    looked = f"{STATE_FILE}, checkpoint-*/{STATE_FILE}, {RESULT_FILE}, {HEALTH_FILE}"
    message = f"{run.path} has no record of a run; looked for {looked}"
    if run.notes:
        message += f". {' '.join(run.notes)}"
    names = (HEALTH_FILE, STATE_FILE, RESULT_FILE)
    inside = sorted({file.parent.name for name in names for file in run.path.glob(f"*/{name}")})
    if inside:
        message += f". It holds the runs {', '.join(inside)}: give one of them, or several"
    return message


def _load_json(run: RunRecord, file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        run.notes.append(f"{file.name} is half-written or no JSON object: it was left out.")
        return None
    return data


def _read_result(run: RunRecord) -> bool:
    """The `result.json` of an experiment's run."""
    result = _load_json(run, run.path / RESULT_FILE)
    if result is None:
        return False
    run.config = result.get("config") or {}
    run.summary = result.get("summary") or ""
    run.history = [entry for entry in result.get("history") or [] if "loss" in entry]
    return True


def _read_state(run: RunRecord) -> bool:
    """Trainer's state: that of the directory or of the last checkpoint, whichever went further."""
    files = [run.path / STATE_FILE]
    checkpoint = last_checkpoint(run.path, state_damage)
    if checkpoint is not None:
        files.append(Path(checkpoint) / STATE_FILE)
    states = [state for file in files if (state := _load_json(run, file)) is not None]
    if not states:
        return False
    state = max(states, key=lambda state: state.get("global_step") or 0)
    log = state.get("log_history") or []
    run.history += [entry for entry in log if "loss" in entry]
    run.evaluations += [entry for entry in log if "eval_loss" in entry]
    run.max_steps = state.get("max_steps") or run.max_steps
    run.tokens = state.get("num_input_tokens_seen") or run.tokens
    ends = [entry[_END] for entry in log if _END in entry]
    run.runtime = ends[-1] if ends else None
    for saved in (state.get("stateful_callbacks") or {}).values():
        attributes = (saved[0] if isinstance(saved, list) else saved).get("attributes") or {}
        if "trained_config" in attributes and not run.config:
            run.config = attributes["trained_config"] or {}
    return True


def _read_health(run: RunRecord) -> bool:
    """`metis_health.jsonl`; with several processes' files, the first that has a step counts."""
    files = sorted(run.path.glob(f"{Path(HEALTH_FILE).stem}*.jsonl"))
    for file in files:
        text = file.read_text()
        records, broken = parse_records(text)
        if broken:
            lines = ", ".join(map(str, broken))
            torn = broken == [len(text.splitlines())]
            reason = ", as a killed run leaves it" if torn else ""
            run.notes.append(f"{file.name}: line {lines} is half-written{reason}: left out.")
        own: dict[str, dict[int, Any]] = {}
        for record in records:  # a step that was written twice counts as it was written last
            for part in ("layers", "noise", "refresh", "switch"):
                if part in record:
                    own.setdefault(part, {})[int(record["step"])] = record[part]
        noise = {
            step: {layer: GradientNoise(*norms) for layer, norms in layers.items()}
            for step, layers in own.get("noise", {}).items()
        }
        run.layers = own.get("layers", {}) | run.layers
        run.noise = noise | run.noise
        run.refreshes = own.get("refresh", {}) | run.refreshes
        run.switches = own.get("switch", {}) | run.switches
    run.layers, run.noise = dict(sorted(run.layers.items())), dict(sorted(run.noise.items()))
    run.refreshes = dict(sorted(run.refreshes.items()))
    _drop_repeated_switches(run)
    return bool(files)


def _drop_repeated_switches(run: RunRecord) -> None:
    """A resumed run makes its switch again, at its first step; the run switched once."""
    last: dict[str, Any] | None = None
    kept = {}
    for step, switch in sorted(run.switches.items()):
        if switch != last:
            kept[step] = last = switch
    run.switches = kept


def _read_description(run: RunRecord) -> None:
    """`metis_run.json`, for what the other files do not say."""
    description = _load_json(run, run.path / RUN_FILE) or {}
    run.config = run.config or description.get("config") or {}
    run.summary = run.summary or description.get("summary") or ""
    run.environment = run.environment or description.get("environment") or {}
    run.model = description.get("model") or ""
    run.max_steps = run.max_steps or description.get("max_steps")
    batch, length = description.get("sequences_per_step"), _sequence_length(run)
    if run.tokens is None and batch and length:
        run.tokens = batch * length * run.last_step


def _sequence_length(run: RunRecord) -> int | None:
    """Tokens of a sequence, as the settings of the experiment that the run belongs to have it."""
    for folder in run.path.resolve().parents[:2]:
        settings = _load_json(run, folder / SETTINGS_FILE)
        if settings is not None:
            return settings.get("sequence_length")
    return None


def _one_entry_a_step(run: RunRecord) -> None:
    """An interrupted and resumed run may have logged a step twice: the later entry counts."""
    by_step = {int(entry["step"]): entry for entry in run.history}
    run.history = [by_step[step] for step in sorted(by_step)]
    by_step = {int(entry["step"]): entry for entry in run.evaluations}
    run.evaluations = [by_step[step] for step in sorted(by_step)]


def events(run: RunRecord) -> list[tuple[int, str, str]]:
    """(step, what, details) of everything out of the ordinary, by step."""
    found: list[tuple[int, str, str]] = []
    for entry in run.history:
        for name in ("loss", "grad_norm"):
            value = entry.get(name)
            if value is not None and not math.isfinite(value):
                found.append((int(entry["step"]), "not finite", f"{name} is {value}"))
    for step, layers in run.layers.items():
        bad = nonfinite_layers(layers)
        if bad:
            shown = ", ".join(bad[:6]) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
            found.append((step, "not finite", f"NaN or inf in {shown} (likely origin first)"))
    for step, layers in run.refreshes.items():
        found.append((step, "refresh", f"{len(layers)} weights decomposed anew"))
    for step, switch in run.switches.items():
        passes = switch.get("high_precision") or []
        how = (
            f"high precision in the {' and '.join(passes)} pass" if passes else "all passes in FP4"
        )
        found.append((step, "switch", f"scheme {switch.get('scheme')}, {how}"))
    return sorted(found)
