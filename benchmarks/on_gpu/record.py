"""The record of one machine: parts, their results, what failed; how a part is run and goes on.

A part yields items. Each result is in the file as soon as it is there, and an item that has one is
not measured again. What fails is recorded with its error, and the others go on; the next call
measures it anew, after all that is still to come.
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
ITSELF = "the part itself"  # stands for an item where a part failed outside of its items
DOES_NOT_FIT = "does_not_fit"  # key of a result that is no result: memory was too small
FAILURES = "failures"  # key of a result that shows something wrong: a list of sentences
_TRACEBACK_LINES = 25

Part = Callable[[Any], Iterable["Item"]]


class Skipped(Exception):
    """A part cannot run here; the text says why."""


class OutOfTime(Exception):
    """An item was ended by the minutes of the call; the same command takes it up."""


class CutOff(OutOfTime):
    """An item was ended by the minutes of the call, and begins from zero in the next one.

    Where it was the first of its call, the next has no more time for it: it has failed.
    """


class Clock:
    """The minutes of one call; None never ends.

    Attributes:
        seconds: of the call.
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
        measure: returns the result, JSON-ready.
        seconds: that it is known to take; it does not begin where less is left.
    """

    key: str
    measure: Callable[[], Any]
    seconds: float = 0.0


@dataclass
class Entry:
    """What the record holds of a part.

    Attributes:
        state: DONE, FAILED, SKIPPED, UNFINISHED or WAITING.
        reason: of the state.
        items: their results.
        errors: of the items that failed.
        seconds: that the items took.
        commits: that the items were measured at.
        options: of the command, that the results depend on.
        outdated: items that are measured anew; their results stay until then.
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
        """Return a copy of which every item is to be measured anew."""
        return replace(deepcopy(self), state=UNFINISHED, outdated=list(self.items))

    def drop(self, keys: Collection[str]) -> None:
        """Forget items."""
        for values in (self.items, self.errors, self.seconds, self.commits):
            for key in values.keys() & set(keys):
                del values[key]
        self.outdated = [key for key in self.outdated if key not in keys]


class Record:
    """The record of one machine, on disk.

    Args:
        path: the file.
        machine: what is measured; a file of another machine is refused.
        identity: the keys of `machine` that decide whether it is another.
        copy: a file that may be there too, from a machine that did not keep its own; read instead
            where its last call began later.

    Raises:
        ValueError: a file is of another machine, or cut short.
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
                    f"{path} has results with {key} {there['machine'].get(key)!r}, and this "
                    f"is {self.machine.get(key)!r}; choose another --name, or delete the file"
                )
        self.parts = {name: Entry(**entry) for name, entry in there["parts"].items()}
        self.calls = there["calls"]
        if self.calls:  # older records hold the machine of the last call alone
            self.calls[-1].setdefault("machine", there["machine"])

    def part(self, name: str) -> Entry:
        return self.parts.setdefault(name, Entry())

    def check(self, name: str, options: Row | None) -> None:
        """Refuse options of a part that are not those of its results; None was given no options.

        Raises:
            ValueError: they are others.
        """
        entry = self.part(name)
        if options is not None and entry.items and entry.options != options:
            raise ValueError(
                f"{self.path} has results of {name} with {_options_text(entry.options)}, and this "
                f"call has {_options_text(options)}; add --again to replace them, or choose "
                "another --name"
            )

    def to_dict(self) -> Row:
        parts = {name: vars(entry) for name, entry in self.parts.items()}
        return {"machine": self.machine, "calls": self.calls, "parts": parts}

    def begin_call(self, minutes: float | None, commit: str | None) -> None:
        """Note that a call has begun."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        call = {"began": now, "minutes": minutes, "commit": commit, "machine": self.machine}
        self.calls.append(call)

    def write(self) -> None:
        """Write the file whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        os.replace(temporary, self.path)


def _read(path: Path) -> Row:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no whole record ({error}); delete it") from None


def _began(there: Row) -> str:
    """When the last call of a record began: ISO 8601 in UTC, which sorts as text."""
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
    """Measure the items of a part that have no result yet, failed, or are outdated; set its state.

    Args:
        name: of the part.
        part: yields its items, given `context`.
        context: for the part.
        entry: takes the results.
        clock: after which nothing begins.
        written: called after every change of `entry`.
        say: shows a line to people.
        commit: that is measured.
        leave: items that are not measured now.
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
                    entry.errors[item.key] = f"{error}; it needs a call of more than {minutes}"
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
        if not entry.items and not entry.errors:  # else its state is that of what it holds
            entry.state = SKIPPED
        entry.reason = str(error)
        written()
        return
    except Exception:
        entry.errors[ITSELF] = _error_text()
        say(f"{name}: FAILED: {entry.errors[ITSELF].splitlines()[-1]}")
    else:
        if not stopped and not keys & entry.errors.keys():
            # Of other measurements, which the part has no more.
            entry.drop((entry.items.keys() | entry.errors.keys()) - keys)
    entry.state = FAILED if entry.errors else UNFINISHED if stopped else DONE
    if entry.errors:
        what = f"{len(entry.errors)} of its measurements failed"
        entry.reason = f"{what}; {entry.reason}" if entry.reason else what
    written()


def _measure(item: Item, entry: Entry) -> None:
    """Put the result of an item into the entry, or its error, in place of what was there."""
    started = time.monotonic()
    found, wrong = None, ""
    try:
        found = item.measure()
        if isinstance(found, dict) and found.get(FAILURES):
            wrong = "\n".join(found[FAILURES])
    except OutOfTime:
        raise  # what was there stays
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
    """Give back what the last measurement held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def text_of(error: Exception) -> str:
    """The kind and the text of an error, and of what caused it."""
    causes = [error, *filter(None, [error.__cause__])]
    return "; from ".join(f"{type(one).__name__}: {one}" for one in causes)
