"""The record of one machine (parts, results, errors), and the code that runs or resumes a part.

A part yields items. Each result is written to the file immediately, and an item with a result is
not measured again. A failed item is recorded with its error, and the part continues; the next call
measures the failed item again, after all unmeasured items.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from timing import Row

DONE, FAILED, SKIPPED = "done", "failed", "skipped"
UNFINISHED, WAITING = "not finished", "to come"
ITSELF = "the part itself"  # item name for an error of a part outside its items
DOES_NOT_FIT = "does_not_fit"  # key in place of a result: memory was too small
FAILURES = "failures"  # key in a result: list of sentences on things that are wrong
_TRACEBACK_LINES = 25

Part = Callable[[Any], Iterable["Item"]]


class Skipped(Exception):
    """Raised if a part cannot run here; the text has the reason."""


class OutOfTime(Exception):
    """Raised if an item ran out of the call's time; the same command resumes the item."""


class CutOff(OutOfTime):
    """Raised if an item ran out of the call's time, and must start over in the next call.

    If it was the first item of its call, the next call has no more time for it: it has failed.
    """


class Clock:
    """The time limit of one call; None means no limit.

    Attributes:
        seconds: the limit.
        measured: items that the call has measured.
    """

    def __init__(self, minutes: float | None) -> None:
        self.seconds = float("inf") if minutes is None else 60 * minutes
        self.measured = 0
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
        measure: returns the JSON-serializable result.
        seconds: expected time; the item does not start with less time left.
    """

    key: str
    measure: Callable[[], Any]
    seconds: float = 0.0


@dataclass
class Entry:
    """A part's entry in the record.

    Attributes:
        state: DONE, FAILED, SKIPPED, UNFINISHED or WAITING.
        reason: of the state.
        items: item -> result.
        errors: failed item -> error.
        seconds: item -> time that it took.
        commits: item -> commit that was measured.
        options: options of the command that the results depend on.
        outdated: items to measure again; their old results stay until then.
    """

    state: str = WAITING
    reason: str = ""
    items: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    commits: dict[str, str | None] = field(default_factory=dict)
    options: Row = field(default_factory=dict)
    outdated: list[str] = field(default_factory=list)

    def anew(self) -> Entry:
        """Return a copy with all items outdated."""
        return replace(deepcopy(self), state=UNFINISHED, outdated=list(self.items))

    def drop(self, keys: Collection[str]) -> None:
        """Remove items."""
        for values in (self.items, self.errors, self.seconds, self.commits):
            for key in values.keys() & set(keys):
                del values[key]
        self.outdated = [key for key in self.outdated if key not in keys]


class Record:
    """The record of one machine, on disk.

    Args:
        path: the file.
        machine: facts of the measured machine; a file of another machine is refused.
        identity: the keys of `machine` that identify a machine.
        copy: an optional second file, for machines that do not keep the first; read instead of
            `path` if its last call began later.

    Raises:
        ValueError: a file is of another machine, or truncated.
    """

    def __init__(
        self,
        path: Path,
        machine: Mapping[str, Any],
        identity: Iterable[str],
        copy: Path | None = None,
    ) -> None:
        self.path, self.machine = path, dict(machine)
        self.parts: dict[str, Entry] = {}
        self.calls: list[Row] = []
        there = [(one, _read(one)) for one in (path, copy) if one is not None and one.is_file()]
        if there:
            self._take_up(*max(there, key=lambda found: _began(found[1])), identity)

    def _take_up(self, path: Path, there: Row, identity: Iterable[str]) -> None:
        for key in identity:
            if there["machine"].get(key) != self.machine.get(key):
                raise ValueError(
                    f"{path} has results with {key} {there['machine'].get(key)!r}, but this call "
                    f"has {self.machine.get(key)!r}; choose another --name, or delete the file"
                )
        self.parts = {name: Entry(**entry) for name, entry in there["parts"].items()}
        self.calls = there["calls"]
        if self.calls:  # older records have only the machine of the last call
            self.calls[-1].setdefault("machine", there["machine"])

    def part(self, name: str) -> Entry:
        return self.parts.setdefault(name, Entry())

    def check(self, name: str, options: Row | None) -> None:
        """Refuse options of a part that differ from its results' options; None: no options given.

        Raises:
            ValueError: the options differ.
        """
        entry = self.part(name)
        if options is not None and entry.items and entry.options != options:
            raise ValueError(
                f"{self.path} has results of {name} with {_options_text(entry.options)}, but "
                f"this call has {_options_text(options)}; add --again to replace them, or choose "
                "another --name"
            )

    def to_dict(self) -> Row:
        parts = {name: vars(entry) for name, entry in self.parts.items()}
        return {"machine": self.machine, "calls": self.calls, "parts": parts}

    def begin_call(self, minutes: float | None, commit: str | None) -> None:
        """Record the start of a call."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        call = {"began": now, "minutes": minutes, "commit": commit, "machine": self.machine}
        self.calls.append(call)

    def write(self) -> None:
        """Write the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        os.replace(temporary, self.path)


def _read(path: Path) -> Row:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a complete record ({error}); delete it") from None


def _began(there: Row) -> str:
    """Return the start of a record's last call: ISO 8601 in UTC, which sorts as text."""
    return there["calls"][-1]["began"] if there["calls"] else ""


def _options_text(options: Row) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in options.items()) or "unknown options"


def run_part(
    name: str,
    part: Part,
    context: Any,
    entry: Entry,
    clock: Clock,
    *,
    written: Callable[[], None],
    say: Callable[[str], None],
    commit: str | None = None,
    leave: Collection[str] = (),
) -> None:
    """Measure a part's items that have no result, failed, or are outdated; set the part's state.

    Args:
        name: of the part.
        part: yields its items, given `context`.
        context: for the part.
        entry: receives the results.
        clock: time limit, after which no item starts.
        written: called after every change of `entry`.
        say: shows a line to the user.
        commit: the commit that is measured.
        leave: items to skip now.
    """
    entry.reason, stopped = "", False
    before = entry.errors.pop(ITSELF, None)
    keys: set[str] = set()
    try:
        for item in part(context):
            keys.add(item.key)
            known = item.key in entry.items and item.key not in entry.errors
            if (known and item.key not in entry.outdated) or item.key in leave:
                continue
            if clock.left() <= item.seconds:
                stopped, entry.reason = True, f"no time was left for {item.key}"
                break
            say(f"{name}: {item.key} ...")
            try:
                _measure(item, entry)
            except OutOfTime as error:
                stopped, entry.reason = True, f"{item.key}: {error}"
                if isinstance(error, CutOff) and not clock.measured:
                    minutes = f"{clock.seconds / 60:g} minutes"
                    entry.errors[item.key] = f"{error}; it needs more than {minutes} in one call"
                    say(f"{name}: {item.key}: FAILED: {entry.errors[item.key]}")
                break
            finally:
                free_memory()
            clock.measured += 1
            entry.commits[item.key] = commit
            failure = entry.errors.get(item.key)
            taken = f"{name}: {item.key}: {entry.seconds[item.key]:.1f} s"
            say(taken if failure is None else f"{taken}, FAILED: {failure.splitlines()[-1]}")
            entry.state = UNFINISHED
            written()
    except Skipped as error:
        if before is not None:
            entry.errors[ITSELF] = before
        if not entry.items and not entry.errors:  # results or errors keep the part's state
            entry.state = SKIPPED
        entry.reason = str(error)
        written()
        return
    except Exception:
        entry.errors[ITSELF] = _error_text()
        say(f"{name}: FAILED: {entry.errors[ITSELF].splitlines()[-1]}")
    else:
        if not stopped and not keys & entry.errors.keys():
            # Remove items that the part no longer yields.
            entry.drop((entry.items.keys() | entry.errors.keys()) - keys)
    entry.state = FAILED if entry.errors else UNFINISHED if stopped else DONE
    if entry.errors:
        what = f"{len(entry.errors)} of its measurements failed"
        entry.reason = f"{what}; {entry.reason}" if entry.reason else what
    written()


def _measure(item: Item, entry: Entry) -> None:
    """Measure an item, and replace its result or error in the entry."""
    started = time.monotonic()
    found, wrong = None, ""
    try:
        found = item.measure()
        if isinstance(found, dict) and found.get(FAILURES):
            wrong = "\n".join(found[FAILURES])
    except OutOfTime:
        raise  # keep the old result
    except torch.OutOfMemoryError as error:
        found = {DOES_NOT_FIT: str(error).split(". ")[0]}
    except Exception:
        wrong = _error_text()
    finally:
        entry.seconds[item.key] = round(time.monotonic() - started, 1)
    for values, value in ((entry.items, found), (entry.errors, wrong or None)):
        if value is None:
            values.pop(item.key, None)
        else:
            values[item.key] = value
    entry.outdated = [key for key in entry.outdated if key != item.key]


def _error_text() -> str:
    return "\n".join(traceback.format_exc().strip().splitlines()[-_TRACEBACK_LINES:])


def free_memory() -> None:
    """Free the memory of the last measurement."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def text_of(error: Exception) -> str:
    """Return the type and text of an error and its cause."""
    causes = [error, *filter(None, [error.__cause__])]
    return "; from ".join(f"{type(one).__name__}: {one}" for one in causes)
