"""Finds and reads the records of one run, whatever state the run was left in.

What is missing is missing on the page; what is broken is left out, and a note names it. Figures are
never repaired: NaN stays NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from metis_hf.lab.run_report import checks
from metis_hf.lab.run_report.run import RunRecord
from metis_hf.shared.checkpoints import STATE_FILE, last_checkpoint, state_damage
from metis_hf.shared.records import SETTINGS_FILE, read_json
from metis_hf.training.gradient_noise import GradientNoise
from metis_hf.training.run_record import (
    HEALTH_FILE,
    LOG_FILE,
    RUN_FILE,
    is_step,
    parse_records,
)

RESULT_FILE = "result.json"
# What Trainer logs at the end of a run: one entry of the whole run, not of a step.
_END, _RATE = "train_runtime", "train_steps_per_second"
_TOKENS = "num_input_tokens_seen"
_OF_EXPERIMENTS = {"health_interval", "eval_sequences"}  # settings that only ours have
_SHOWN_FAULTS = 6  # of a file; a note says how many more there are


def read_run(path: Path) -> RunRecord:
    """Read a run's directory: a Trainer's output_dir, or a scheme's of an experiment.

    Raises:
        FileNotFoundError: no such directory, or no record of a run in it; the message names the
            files that were looked for.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no directory; give the output_dir of a run")
    run = RunRecord(path)
    found = [_read_result(run), _read_log(run)]
    # Of the last run that began here, where a checkpoint may be of an earlier one.
    batch, is_new = _read_description(run)
    found += [_read_state(run, is_new), _read_health(run)]
    if not any(found):
        raise FileNotFoundError(_nothing_found(run))
    _one_entry_a_step(run)
    length = _sequence_length(run)
    if run.tokens is None and batch and length:
        run.tokens = batch * length * run.last_step
    run.name = str(run.config.get("scheme") or path.resolve().name)
    if run.evaluations and not run.history:
        run.notes.append(
            "No training loss: none was logged. Trainer logs one every logging_steps, 500 where "
            "nothing else is asked for."
        )
    elif not run.history:
        run.notes.append(
            f"No losses: {LOG_FILE}, which MetisCallback writes, {STATE_FILE}, which Trainer "
            "writes into every checkpoint and at trainer.save_state(), and "
            f"{RESULT_FILE} have none or are not there."
        )
    if not run.layers:
        run.notes.append(
            f"No spectral health: {HEALTH_FILE} was not found or holds no measurement. "
            "MetisCallback(health_interval=...) writes it."
        )
    return run


def read_runs(paths: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
    """Read several runs, each once, and leave out those that have no record.

    Returns:
        The runs; for each path that was left out, a sentence that says why.

    Raises:
        FileNotFoundError: none of them has a record.
    """
    runs, left_out = [], []
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
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
    looked = f"{LOG_FILE}, {STATE_FILE}, checkpoint-*/{STATE_FILE}, {RESULT_FILE}, {HEALTH_FILE}"
    message = f"{run.path} has no record of a run; looked for {looked}"
    if run.notes:
        message += f". {' '.join(run.notes)}"
    names = (HEALTH_FILE, LOG_FILE, STATE_FILE, RESULT_FILE)
    places = ("*", "runs/*/*")  # of a demo's and a comparison's runs
    files = (file for at in places for name in names for file in run.path.glob(f"{at}/{name}"))
    inside = sorted({file.parent.relative_to(run.path).as_posix() for file in files})
    if inside:
        message += f". It holds the runs {', '.join(inside)}: give one of them, or several"
    return message


def _load_json(run: RunRecord, file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_bytes().decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        run.notes.append(f"{file.name} is half-written or no JSON object: it was left out.")
        return None
    return data


def _part(run: RunRecord, file: Path, data: dict[str, Any], name: str, kind: type) -> Any:
    """Return a field of a JSON file; an empty one of its kind where it is missing or malformed."""
    value = data.get(name)
    if isinstance(value, kind) and not (kind is str and value and not checks.is_text(value)):
        return value
    if value is not None:
        kinds: dict[type, str] = {dict: "no object", list: "no list", str: "no text"}
        run.notes.append(f"{file.name}: {name} is {kinds[kind]}: it was left out.")
    return kind()


def _count(run: RunRecord, file: Path, data: dict[str, Any], name: str) -> int | None:
    """Return a field that counts something; None where it is missing, zero or malformed."""
    value = data.get(name)
    if value is not None and not checks.is_count(value):
        run.notes.append(f"{file.name}: {name} is no count: it was left out.")
        return None
    return value or None


def _note_faults(run: RunRecord, file: Path, faults: dict[str, str]) -> None:
    """Name what was left out of a file: place -> what is wrong there."""
    if faults:
        shown = [f"{place} ({fault})" for place, fault in list(faults.items())[:_SHOWN_FAULTS]]
        more = len(faults) - len(shown)
        rest = f" and {more} more" if more else ""
        run.notes.append(f"{file.name}: left out {', '.join(shown)}{rest}.")


def _take_log(
    run: RunRecord, file: Path, log: Iterable[tuple[int, Any]], place: str = "entry"
) -> None:
    """Add the well-formed entries of a log to the run's history, evaluations, time and tokens.

    Args:
        run: of the log.
        file: that the log is from.
        log: entries by the number that notes name them by.
        place: the number's unit.
    """
    faults: dict[str, str] = {}
    for number, raw in log:
        try:
            entry = checks.log_entry(raw)
            if _END in entry:
                rate = checks.number(entry[_RATE], _RATE) if _RATE in entry else None
                run.runtime, run.rate = checks.number(entry[_END], _END), rate
                run.ended = entry["step"]
        except checks.Malformed as error:
            faults[f"{place} {number}"] = str(error)
            continue
        if checks.is_count(seen := entry.get(_TOKENS)):
            run.tokens = max(run.tokens or 0, seen) or None
        if "loss" in entry:
            run.history.append(entry)
        if checks.evaluation_losses(entry):
            run.evaluations.append(entry)
    _note_faults(run, file, faults)


def _read_result(run: RunRecord) -> bool:
    """Read the `result.json` of an experiment's run."""
    file = run.path / RESULT_FILE
    result = _load_json(run, file)
    if result is None:
        return False
    run.config = _part(run, file, result, "config", dict)
    run.summary = _part(run, file, result, "summary", str)
    _take_log(run, file, enumerate(_part(run, file, result, "history", list), start=1))
    return True


def _read_log(run: RunRecord) -> bool:
    """Read Trainer's log as MetisCallback wrote it down, which no checkpoint has to save."""
    file = run.path / LOG_FILE
    records = _read_lines(run, file)
    _take_log(run, file, records.items(), "line")
    return file.is_file()


def _read_state(run: RunRecord, is_new: bool) -> bool:
    """Read Trainer's state: of the directory or the last checkpoint, whichever went further.

    Args:
        run: with what its log has.
        is_new: whether it began at step 0, so that its log is complete.
    """
    files = [run.path / STATE_FILE]
    checkpoint = last_checkpoint(run.path, state_damage)
    if checkpoint is not None:
        files.append(Path(checkpoint) / STATE_FILE)
    states = [(file, state) for file in files if (state := _load_json(run, file)) is not None]
    if not states:
        return False
    file, state = max(states, key=lambda found: _count(run, found[0], found[1], "global_step") or 0)
    entries = _part(run, file, state, "log_history", list)
    steps, saved = _logged_steps(run), _steps_with_loss(entries)
    damaged = any(note.startswith(LOG_FILE) for note in run.notes)
    if is_new and (run.path / LOG_FILE).is_file() and not damaged:
        is_other = not saved <= set(steps)
    else:
        is_other = bool(steps) and max(saved, default=0) > steps[-1]
    if is_other:
        run.notes.append(
            f"{file.parent.name}/{file.name} has losses of steps that {LOG_FILE} has not: it is of "
            "an earlier run in this directory, and was left out."
        )
        return True
    # The log is complete from its first step on, but for step times, which the callback does not
    # see. An entry with another loss is of a step that was made again, or of an earlier run.
    losses = {entry["step"]: entry["loss"] for entry in run.history}
    numbered = [
        (number, entry)
        for number, entry in enumerate(entries, start=1)
        if not steps or _step_of(entry) < steps[0] or _has_loss(entry, losses)
    ]
    _take_log(run, file, numbered)
    run.max_steps = run.max_steps or _count(run, file, state, "max_steps")
    seen = _count(run, file, state, _TOKENS) or 0
    run.tokens = max(run.tokens or 0, seen) or None  # the log may go on after the checkpoint
    callbacks = _part(run, file, state, "stateful_callbacks", dict)
    for name in callbacks:
        one = callbacks[name][:1] if isinstance(callbacks[name], list) else [callbacks[name]]
        attributes = one[0].get("attributes") if one and isinstance(one[0], dict) else None
        if isinstance(attributes, dict) and not run.config:
            run.config = _part(run, file, attributes, "trained_config", dict)
    return True


def _logged_steps(run: RunRecord) -> list[int]:
    return sorted({entry["step"] for entry in (*run.history, *run.evaluations)})


def _steps_with_loss(entries: list[Any]) -> set[int]:
    """Return the steps with a loss, of training or evaluation; the end has an entry too."""
    whole = (e for e in entries if isinstance(e, dict) and is_step(e.get("step")))
    return {e["step"] for e in whole if "loss" in e or checks.evaluation_losses(e)}


def _step_of(entry: Any) -> int:
    step: Any = entry.get("step") if isinstance(entry, dict) else None
    return step if is_step(step) else 0


def _has_loss(entry: Any, losses: dict[int, float]) -> bool:
    """Return whether a log entry has the loss of its step."""
    if not isinstance(entry, dict) or "loss" not in entry:
        return False
    return _step_of(entry) in losses and losses[_step_of(entry)] == entry["loss"]


def _read_lines(run: RunRecord, file: Path) -> dict[int, dict[str, Any]]:
    """Return the records of a file by line, and note which lines are none."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        run.notes.append(f"{file.name} cannot be read ({error.strerror}): it was left out.")
        return {}
    records, faults = parse_records(data)
    last = max([*records, *faults], default=0)
    if last in faults and not data.endswith(b"\n"):
        del faults[last]
        run.notes.append(
            f"{file.name}: line {last} is half-written, as a killed run leaves it: left out."
        )
    _note_faults(run, file, {f"line {number}": fault for number, fault in faults.items()})
    return records


def _read_health(run: RunRecord) -> bool:
    """Read `metis_health.jsonl`; a step that was written twice counts as it was written last."""
    file = run.path / HEALTH_FILE
    found: dict[str, dict[int, Any]] = {part: {} for part in checks.PARTS}
    faults: dict[str, str] = {}
    for number, record in _read_lines(run, file).items():
        for part in found.keys() & record.keys():
            try:
                found[part][record["step"]] = checks.PARTS[part](record[part])
            except checks.Malformed as error:
                faults[f"{part} in line {number}"] = str(error)
    _note_faults(run, file, faults)
    by_step = {part: dict(sorted(found[part].items())) for part in found}
    run.layers, run.refreshes, run.switches = (
        by_step[part] for part in ("layers", "refresh", "switch")
    )
    run.noise = {
        step: {layer: GradientNoise(*norms) for layer, norms in layers.items()}
        for step, layers in by_step["noise"].items()
    }
    _drop_repeated_switches(run)
    return file.is_file()


def _drop_repeated_switches(run: RunRecord) -> None:
    """Drop the switch that a resumed run makes again, at its first step; it switched once."""
    last: dict[str, Any] | None = None
    kept = {}
    for step, switch in run.switches.items():
        if switch != last:
            kept[step] = last = switch
    run.switches = kept


def _read_description(run: RunRecord) -> tuple[int | None, bool]:
    """Read `metis_run.json`, for what the other files do not say.

    Returns:
        Sequences of a step; whether the run is known to have begun at step 0.
    """
    file = run.path / RUN_FILE
    description = _load_json(run, file) or {}
    run.config = run.config or _part(run, file, description, "config", dict)
    run.summary = run.summary or _part(run, file, description, "summary", str)
    run.conversion = _part(run, file, description, "conversion", dict)
    run.environment = run.environment or _part(run, file, description, "environment", dict)
    if run.environment:
        versions = _part(run, file, run.environment, "versions", dict)
        run.environment = {**run.environment, "versions": versions}
    run.model = _part(run, file, description, "model", str)
    run.max_steps = run.max_steps or _count(run, file, description, "max_steps")
    is_new = description.get("began_at") == 0
    return _count(run, file, description, "sequences_per_step"), is_new


def _sequence_length(run: RunRecord) -> int | None:
    """Return tokens per sequence, as the settings of the run's experiment have it.

    They lie outside of the run, where other programs may keep a file of that name.
    """
    for folder in run.path.resolve().parents[:3]:  # of a comparison: out/runs/variant/seed-0
        try:
            settings = read_json(folder / SETTINGS_FILE)
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(settings, dict) and isinstance(settings.get("experiment"), dict):
            settings = settings["experiment"]  # where a comparison keeps it
        if isinstance(settings, dict) and settings.keys() & _OF_EXPERIMENTS:
            length = settings.get("sequence_length")
            return length if checks.is_count(length) else None
    return None


def _one_entry_a_step(run: RunRecord) -> None:
    """Join the entries of a step; the later one counts where a resumed run logged it twice.

    Evaluation sets have entries of their own, and `result.json` and Trainer's state have step
    times, which the callback does not see.
    """
    run.history, run.evaluations = _joined(run.history), _joined(run.evaluations)


def _joined(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    for entry in entries:
        by_step.setdefault(entry["step"], {}).update(entry)
    return [by_step[step] for step in sorted(by_step)]
