"""Regular expressions matched in bounded time, for patterns that come from other people's files.

Python's `re` tries one way after another, and some patterns have exponentially many: "(a+)+$" takes
minutes on thirty letters. `NamePattern` follows all ways at once, so its work is at most the
characters of a name times the states of the pattern. It answers what `re` answers.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

# The parser and compiler of `re` itself: syntax and character classes are the same by construction.
_NEW = sys.version_info >= (3, 11)
_parser: Any = importlib.import_module("re._parser" if _NEW else "sre_parse")
_compiler: Any = importlib.import_module("re._compiler" if _NEW else "sre_compile")

MAX_LENGTH = 2_000  # characters of a pattern: some thirty names of modules
MAX_STATES = 4_000  # a letter is one, "a{20}" twenty: twice what the longest literal pattern needs
MAX_NESTING = 50  # groups within groups: names of modules need two or three
_LOOKAROUND_COST = 20  # how often a state inside a lookaround counts: it is tried at each place
_MAX_REMEMBERED = 10_000  # states in the remembered sets of a pattern

# Letters, digits, dots (any character) and hyphens match in one way only.
_ONE_WAY = re.compile(r"[\w.-]*")

# Flags of the whole pattern, which `re` takes at its very beginning alone.
_FLAGS = re.compile(r"((?:\(\?[a-zA-Z]+\))+)(.*)", re.DOTALL)

_REFUSED = {
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}


class Matcher(Protocol):
    """The result of `name_pattern`: of what its methods return the truth counts."""

    def match(self, name: str, /) -> object:
        """Return something true if the pattern fits the beginning of a name."""

    def fullmatch(self, name: str, /) -> object:
        """Return something true if the pattern fits a whole name."""


@lru_cache(maxsize=20_000)
def name_pattern(text: str, before: str = "", after: str = "") -> Matcher:
    """Return a matcher of the regular expression before + text + after.

    Flags that `text` begins with are those of `text` alone.

    Args:
        text: the pattern, from a file of anyone's.
        before: trusted pattern in front of it.
        after: trusted pattern behind it.

    Raises:
        ValueError: as of `NamePattern`.
    """
    if _ONE_WAY.fullmatch(text):
        return re.compile(before + text + after)
    alone = NamePattern(text)  # what it says of wrong places counts from the start of `text`
    return NamePattern(before + _with_own_flags(text) + after) if before or after else alone


def _with_own_flags(text: str) -> str:
    """Return a pattern that may stand within another: "(?i)a" as "(?i:a)"."""
    found = _FLAGS.fullmatch(text)
    if found is None:
        return text
    flags = "".join(filter(str.isalpha, found[1]))
    end = "\n" if "x" in flags else ""  # of a comment
    return f"(?{flags}:{found[2]}{end})"


def _nesting(text: str) -> int:
    """Return how deep parentheses are nested, those of character sets included."""
    signs = (character for character in re.sub(r"\\.", "", text) if character in "()")
    return max(accumulate(1 if sign == "(" else -1 for sign in signs), default=0)


class NamePattern:
    """A regular expression that is matched in bounded time.

    Lookarounds, lazy repeats, anchors and inline flags are supported.

    Args:
        text: the pattern.

    Attributes:
        states: what matching costs for each character of a name.

    Raises:
        ValueError: not a regular expression; a backreference, a condition, an atomic group or a
            possessive repeat, none of which this way of matching can do; more than `MAX_LENGTH`
            characters or `MAX_STATES` states.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it has {len(text):,} characters; at most {MAX_LENGTH:,} are allowed")
        if _nesting(text) > MAX_NESTING:  # whatever recursion limit the process has set itself
            raise ValueError("its groups are nested too deeply")
        try:
            re.compile(text)  # says what is wrong, in the words that people know
            tree = _parser.parse(text)
            builder = _Builder()
            self._automaton = builder.automaton(tree, tree.state.flags, cost=1)
        except (re.error, OverflowError) as error:
            raise ValueError(str(error)) from error
        except RecursionError:
            raise ValueError("its groups are nested too deeply") from None
        self.states = builder.states

    def match(self, name: str, /) -> bool:
        """Return whether the pattern fits the beginning of a name."""
        return self._automaton.accepts(name, 0, self._automaton.context(name))

    def fullmatch(self, name: str, /) -> bool:
        """Return whether the pattern fits a whole name."""
        return self._automaton.accepts(name, 0, self._automaton.context(name), whole=True)


@dataclass
class _State:
    """One state: reads a character where `test` is set, else goes on where its condition holds."""

    to: list[int]
    test: re.Pattern[str] | None = None
    condition: int | None = None


class _Anchor:
    """A condition on a place in a name: ^, $, \\A, \\Z, \\b or \\B, as `re` decides it."""

    def __init__(self, compiled: re.Pattern[str]) -> None:
        self._compiled = compiled

    def holds(self, name: str) -> list[bool]:
        """Return for each of the len(name) + 1 places whether the condition holds."""
        return [self._compiled.match(name, place) is not None for place in range(len(name) + 1)]


class _Lookaround:
    """A condition on a place in a name: (?=...), (?!...), (?<=...) or (?<!...).

    Args:
        automaton: of what is inside.
        width: number of characters looked back; 0 looks ahead.
        negated: whether the inside must not fit.
    """

    def __init__(self, automaton: _Automaton, width: int, negated: bool) -> None:
        self._automaton, self._width, self._negated = automaton, width, negated

    def holds(self, name: str) -> list[bool]:
        """Return for each of the len(name) + 1 places whether the condition holds."""
        context = self._automaton.context(name)
        starts = (place - self._width for place in range(len(name) + 1))
        return [
            (start >= 0 and self._automaton.accepts(name, start, context)) != self._negated
            for start in starts
        ]


class _Automaton:
    """States of which several are active at once. State 0 is the end."""

    def __init__(
        self, states: list[_State], conditions: list[_Anchor | _Lookaround], start: int
    ) -> None:
        self._states, self._conditions = states, conditions
        self._start = frozenset([start])
        self._remembered = 0
        self._closures: dict[tuple[frozenset[int], tuple[bool, ...]], frozenset[int]] = {}
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def context(self, name: str) -> list[tuple[bool, ...]]:
        """Return for each place of a name which conditions hold there."""
        if not self._conditions:
            return [()] * (len(name) + 1)
        return list(zip(*(condition.holds(name) for condition in self._conditions)))

    def accepts(
        self, name: str, start: int, context: list[tuple[bool, ...]], *, whole: bool = False
    ) -> bool:
        """Return whether name[start:end] fits for any end, or with `whole` for the last."""
        active = self._start
        for place in range(start, len(name) + 1):
            active = self._closure(active, context[place])
            if 0 in active and (place == len(name) or not whole):
                return True
            if not active or place == len(name):
                break
            active = self._step(active, name[place])
        return False

    def _closure(self, states: frozenset[int], holds: tuple[bool, ...]) -> frozenset[int]:
        """Return the states, 0 among them, that are reached without reading a character."""
        closure = self._closures.get((states, holds))
        if closure is None:
            seen, stack = set(states), list(states)
            while stack:
                state = self._states[stack.pop()]
                if state.test is None and (state.condition is None or holds[state.condition]):
                    new = [to for to in state.to if to not in seen]
                    seen.update(new)
                    stack += new
            closure = frozenset(s for s in seen if s == 0 or self._states[s].test is not None)
            self._remember(closure)
            self._closures[states, holds] = closure
        return closure

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        """Return the states behind those that read this character."""
        after = self._steps.get((states, character))
        if after is None:
            after = frozenset(
                to
                for state in map(self._states.__getitem__, states)
                if state.test is not None and state.test.match(character)
                for to in state.to
            )
            self._remember(after)
            self._steps[states, character] = after
        return after

    def _remember(self, states: frozenset[int]) -> None:
        """Make room: what is remembered stays bounded too."""
        self._remembered += 1 + len(states)
        if self._remembered > _MAX_REMEMBERED:
            self._closures.clear()
            self._steps.clear()
            self._remembered = 0


class _Builder:
    """Builds automata from what the parser of `re` gives.

    Each part is built towards the state that follows it, so the last part of a sequence is first.
    """

    def __init__(self) -> None:
        self.states = 0

    def automaton(self, tree: Iterable[Any], flags: int, *, cost: int) -> _Automaton:
        """Return the automaton of a parsed pattern; each of its states counts `cost`."""
        states: list[_State] = [_State([])]
        conditions: list[_Anchor | _Lookaround] = []

        def add(state: _State) -> int:
            self._count(cost)
            states.append(state)
            return len(states) - 1

        def sequence(parts: Iterable[Any], flags: int, end: int) -> int:
            self._count(cost)  # of empty groups in large repeats too
            for operation, value in reversed(list(parts)):
                end = part(str(operation), value, flags, end, operation)
            return end

        def part(name: str, value: Any, flags: int, end: int, operation: Any) -> int:
            if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
                test = _compiled(operation, tuple(value) if name == "IN" else value, flags)
                return add(_State([end], test=test))
            if name == "BRANCH":
                return add(_State([sequence(way, flags, end) for way in value[1]]))
            if name == "SUBPATTERN":
                _, added, removed, inside = value
                if added & _parser.TYPE_FLAGS:
                    flags &= ~_parser.TYPE_FLAGS
                return sequence(inside, (flags | added) & ~removed, end)
            if name in ("MAX_REPEAT", "MIN_REPEAT"):
                least, most, inside = value
                return repeat(least, most, inside, flags, end)
            if name == "FAILURE":  # what an empty (?!) is
                return add(_State([]))
            if name in _REFUSED:
                raise ValueError(f"it has {_REFUSED[name]}, which is not supported here")
            conditions.append(condition(name, value, flags, operation))
            return add(_State([end], condition=len(conditions) - 1))

        def repeat(least: int, most: int, inside: Any, flags: int, end: int) -> int:
            if most == _parser.MAXREPEAT:
                loop = add(_State([end]))
                states[loop].to.append(sequence(inside, flags, loop))
                start = loop
            else:
                start = end
                for _ in range(most - least):
                    start = add(_State([end, sequence(inside, flags, start)]))
            for _ in range(least):
                start = sequence(inside, flags, start)
            return start

        def condition(name: str, value: Any, flags: int, operation: Any) -> _Anchor | _Lookaround:
            if name == "AT":
                return _Anchor(_compiled(operation, value, flags))
            direction, inside = value
            inner = self.automaton(inside, flags, cost=_LOOKAROUND_COST)
            width = inside.getwidth()[0] if direction < 0 else 0
            return _Lookaround(inner, width, negated=name == "ASSERT_NOT")

        start = sequence(tree, flags, 0)
        return _Automaton(states, conditions, start)

    def _count(self, cost: int) -> None:
        self.states += cost
        if self.states > MAX_STATES:
            raise ValueError(
                f"it needs more than {MAX_STATES:,} states; write counted repeats ({{m,n}}) and "
                "lookarounds shorter"
            )


@lru_cache(maxsize=4096)
def _compiled(operation: Any, value: Any, flags: int) -> re.Pattern[str]:
    """Return one character class, or one anchor, as a pattern of `re`."""
    item = (operation, list(value) if isinstance(value, tuple) else value)
    return _compiler.compile(_parser.SubPattern(_parser.State(), [item]), flags)
