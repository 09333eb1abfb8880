"""The record of one machine: parts, their results, what failed; how a part is run and goes on.

A part yields items. Each result is in the file as soon as it is there, and an item that has one is
not measured again. What fails is recorded with its error, and the others go on.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timing import Row

DONE, FAILED, SKIPPED = "done", "failed", "skipped"
UNFINISHED, WAITING = "not finished", "to come"
ITSELF = "the part itself"  # stands for an item where a part failed outside of its items
DOES_NOT_FIT = "does_not_fit"  # key of a result that is no result: memory was too small
FAILURES = "failures"  # key of a result that shows something wrong: a list of sentences
_TRACEBACK_LINES = 25

Part = Callable[[Any], Iterable["Item"]]


class Skipped(Exception):
    """A part cannot run here; the text says why."""


class OutOfTime(Exception):
    """An item was ended by the minutes of the call; the same command takes it up."""


class Clock:
    """The minutes of one call; None never ends."""

    def __init__(self, minutes: float | None) -> None:
        self.seconds = float("inf") if minutes is None else 60 * minutes
        self._started = time.monotonic()

    def passed(self) -> float:
        return time.monotonic() - self._started

    def left(self) -> float:
        return self.seconds - self.passed()


@dataclass(frozen=True)
class Item:
    """One measurement of a part.

    Attributes:
        key: its name in the record.
        measure: returns the result, JSON-ready.
        seconds: that it is known to take; it does not begin where less is left.
    """

    key: str
    measure: Callable[[], Any]
    seconds: float = 0.0


@dataclass
class Entry:
    """What the record holds of a part."""

    state: str = WAITING
    reason: str = ""
    items: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Record:
    """The record of one machine, on disk.

    Args:
        path: the file.
        machine: what is measured; a file of another machine is refused.
        identity: the keys of `machine` that decide whether it is another.

    Raises:
        ValueError: the file is of another machine, or cut short.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any], identity: Iterable[str]) -> None:
        self.path, self.machine = path, dict(machine)
        self.parts: dict[str, Entry] = {}
        self.calls: list[Row] = []
        if path.is_file():
            self._read(identity)

    def _read(self, identity: Iterable[str]) -> None:
        try:
            there = json.loads(self.path.read_text())
        except ValueError as error:
            raise ValueError(f"{self.path} is no whole record ({error}); delete it") from None
        for key in identity:
            if there["machine"].get(key) != self.machine.get(key):
                raise ValueError(
                    f"{self.path} has results with {key} {there['machine'].get(key)!r}, and this "
                    f"is {self.machine.get(key)!r}; choose another --name, or delete the file"
                )
        self.parts = {name: Entry(**entry) for name, entry in there["parts"].items()}
        self.calls = there["calls"]

    def part(self, name: str) -> Entry:
        return self.parts.setdefault(name, Entry())

    def to_dict(self) -> Row:
        parts = {name: vars(entry) for name, entry in self.parts.items()}
        return {"machine": self.machine, "calls": self.calls, "parts": parts}

    def begin_call(self, minutes: float | None, commit: str | None) -> None:
        """Note that a call has begun."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.calls.append({"began": now, "minutes": minutes, "commit": commit})

    def write(self) -> None:
        """Write the file whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        os.replace(temporary, self.path)


def run_part(
    name: str,
    part: Part,
    context: Any,
    entry: Entry,
    clock: Clock,
    *,
    written: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Measure the items of a part that have no result yet, and set its state.

    Args:
        name: of the part.
        part: yields its items, given `context`.
        context: for the part.
        entry: takes the results.
        clock: after which nothing begins.
        written: called after every change of `entry`.
        say: shows a line to people.
    """
    entry.reason, stopped = "", False
    entry.errors.pop(ITSELF, None)
    try:
        for item in part(context):
            if item.key in entry.items:
                continue
            if clock.left() <= item.seconds:
                stopped, entry.reason = True, f"no time was left for {item.key}"
                break
            say(f"{name}: {item.key} ...")
            try:
                _measure(item, entry)
            except OutOfTime as error:
                stopped, entry.reason = True, f"{item.key}: {error}"
                break
            finally:
                free_memory()
            failure = entry.errors.get(item.key)
            taken = f"{name}: {item.key}: {entry.seconds[item.key]:.1f} s"
            say(taken if failure is None else f"{taken}, FAILED: {failure.splitlines()[-1]}")
            entry.state = UNFINISHED
            written()
    except Skipped as error:
        entry.state, entry.reason = SKIPPED, str(error)
        written()
        return
    except Exception:
        entry.errors[ITSELF] = _error_text()
        say(f"{name}: FAILED: {entry.errors[ITSELF].splitlines()[-1]}")
    entry.state = FAILED if entry.errors else UNFINISHED if stopped else DONE
    if entry.errors:
        what = f"{len(entry.errors)} of its measurements failed"
        entry.reason = f"{what}; {entry.reason}" if entry.reason else what
    written()


def _measure(item: Item, entry: Entry) -> None:
    """Put the result of an item into the entry, or its error."""
    started = time.monotonic()
    entry.errors.pop(item.key, None)
    try:
        found = item.measure()
        entry.items[item.key] = found
        if isinstance(found, dict) and found.get(FAILURES):
            entry.errors[item.key] = "\n".join(found[FAILURES])
    except OutOfTime:
        raise
    except torch.OutOfMemoryError as error:
        entry.items[item.key] = {DOES_NOT_FIT: str(error).split(". ")[0]}
    except Exception:
        entry.errors[item.key] = _error_text()
    finally:
        entry.seconds[item.key] = round(time.monotonic() - started, 1)


def _error_text() -> str:
    return "\n".join(traceback.format_exc().strip().splitlines()[-_TRACEBACK_LINES:])


def free_memory() -> None:
    """Give back what the last measurement held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
