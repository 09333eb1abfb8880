"""Which combinations of factors a test runs on.

Factors that can interact are crossed. One that only has to be there, beside each of the others, is
rotated: every combination of crossed levels runs with the next combination of rotated ones, so
that all levels appear, and those of any two rotated factors soon meet. `pytest --full` crosses
everything.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

# Parameters are chosen while tests are collected: the option of pytest (see conftest.py) has to be
# known by then, in every worker process.
FULL = "METIS_TESTS_FULL"

Levels = Sequence[Any]
Factors = Mapping[str, Levels]  # name, or "a, b" for levels that are pairs -> levels


def full() -> bool:
    """Return whether every test runs on all combinations."""
    return bool(os.environ.get(FULL))


full_only = pytest.mark.skipif(not full(), reason="takes long; runs with --full")


def cases(
    crossed: Factors, *, rotated: Factors, ids: Callable[[Any], str] = str, slow: Levels = ()
) -> pytest.MarkDecorator:
    """Return the parametrization of a test by combinations of factors.

    Args:
        crossed: factors of which every combination runs.
        rotated: factors that take turns beside those.
        ids: the text that stands for a level in a test's name.
        slow: levels of the first crossed factor whose cases are marked slow.
    """
    names = [name.strip() for factor in (*crossed, *rotated) for name in factor.split(",")]
    levels = [_parts(crossed), _parts(rotated)]
    if full():
        chosen = [a + b for a, b in itertools.product(*map(_product, levels))]
    else:
        turns = _mixed(levels[1])
        chosen = [
            combination + _turn(turns, number)
            for number, combination in enumerate(_product(levels[0]))
        ]
        _check(rotated, chosen, len(names))
    first = next(iter(crossed))
    width = first.count(",") + 1
    late = [values[:width] for values in _parts({first: slow})[0]]
    marks = [pytest.mark.slow if values[:width] in late else () for values in chosen]
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*values, id="-".join(map(ids, values)), marks=mark)
            for values, mark in zip(chosen, marks)
        ],
    )


def some_slow(levels: Iterable[Any], slow: Levels) -> list[Any]:
    """Return the levels as parameters of a test, and mark those among `slow` as slow.

    For levels that cost much and differ from quick ones in nothing that the test looks at.
    """
    levels = list(levels)
    assert len(slow) < len(levels), "nothing would be left for the quick suite"
    return [
        pytest.param(
            *(level if isinstance(level, tuple) else (level,)),
            marks=pytest.mark.slow if level in slow else (),
        )
        for level in levels
    ]


def thinned(levels: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """Return the levels that `keep` is true of, or all of them in a full run."""
    levels = list(levels)
    kept = [level for level in levels if keep(level)]
    assert kept, f"none of {levels} is kept: the test would never run"
    return levels if full() else kept


def named(levels: Iterable[Any], names: Iterable[Any]) -> list[Any]:
    """Return the levels that are among `names`, or all of them in a full run."""
    levels, names = list(levels), list(names)
    missing = [name for name in names if name not in levels]
    assert not missing, f"{missing} would never run: no such level in {levels}"
    return thinned(levels, names.__contains__)


def _parts(factors: Factors) -> list[list[tuple[Any, ...]]]:
    """Return the levels of each factor as tuples, one entry for each name."""
    return [
        [tuple(level) if "," in name else (level,) for level in levels]
        for name, levels in factors.items()
    ]


def _product(factors: list[list[tuple[Any, ...]]]) -> Iterator[tuple[Any, ...]]:
    for combination in itertools.product(*factors):
        yield tuple(itertools.chain.from_iterable(combination))


def _mixed(factors: list[list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Return all combinations, those first in which two levels meet that had not met before."""
    if not factors:
        return [()]
    left = list(itertools.product(*(range(len(levels)) for levels in factors)))
    order: list[tuple[int, ...]] = []
    met: set[tuple[Any, ...]] = set()
    while left:
        best = max(left, key=lambda combination: len(_meetings(combination) - met))
        if not _meetings(best) - met:
            met = set()  # all have met: another round
            continue
        met |= _meetings(best)
        left.remove(best)
        order.append(best)
    return [
        tuple(itertools.chain.from_iterable(levels[i] for levels, i in zip(factors, combination)))
        for combination in order
    ]


def _meetings(combination: tuple[int, ...]) -> set[tuple[Any, ...]]:
    """Return the levels and the pairs of levels in a combination."""
    placed = list(enumerate(combination))
    return {(level,) for level in placed} | set(itertools.combinations(placed, 2))


def _turn(turns: list[tuple[Any, ...]], number: int) -> tuple[Any, ...]:
    # One further after each round: else a crossed factor of as many levels would always meet the
    # same ones.
    return turns[(number + number // len(turns)) % len(turns)]


def _check(rotated: Factors, chosen: list[tuple[Any, ...]], width: int) -> None:
    """Refuse a design in which a level of a rotated factor never runs."""
    most = max((len(levels) for levels in rotated.values()), default=0)
    assert len(chosen) >= most, f"{len(chosen)} cases for {most} levels of a rotated factor"
    assert all(len(values) == width for values in chosen)
