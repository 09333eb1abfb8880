"""The checks of a MetisConfig: ranges, choices, and patterns that are matched in bounded time.

Standard library only, as the config itself. What a scheme does not take it refuses when it is
built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from metis_hf.shared.messages import shown
from metis_hf.shared.patterns import MAX_STATES, Matcher, name_pattern

DECOMPOSABLE: tuple[str, ...] = ("weight", "activation", "gradient")
OPERAND_MODES: tuple[str, ...] = ("shared", "contraction")
PASSES: tuple[str, ...] = ("forward", "backward")
BACKENDS: tuple[str, ...] = ("emulated", "native", "auto")
OUTER_SCALES: tuple[str, ...] = ("tensor", "token")
ROUNDINGS: tuple[str, ...] = ("nearest", "stochastic")
SCALE_ROUNDINGS: tuple[str, ...] = ("nearest", "up", "floor", "even")  # each format's own
# A config is read from other people's checkpoints: no value may make a model run for ever.
LARGEST_SIZE = 2**24  # more than any dimension of a weight, and than any number of blocks
MOST_ITERATIONS = 64  # a ratio .9 of neighbouring singular values has become .9^129 = 1e-6 by then
MOST_NAMES = 10_000  # in a list or a mapping: more than any model has linear layers
INT64 = 2**63


def check(config: Any) -> None:
    """Refuse values out of range, and combinations that would silently do nothing.

    Args:
        config: a MetisConfig.

    Raises:
        ValueError: the message names the field, its value and the choices.
    """

    def require(ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ValueError(f"{name}={shown(getattr(config, name))}; expected {expected}")

    def require_integer(
        name: str, least: int, most: int = LARGEST_SIZE, *, optional: bool = False
    ) -> None:
        value = getattr(config, name)
        ok = (optional and value is None) or (is_int(value) and least <= value <= most)
        expected = f"{'None or ' * optional}an integer from {least} to {most}"
        require(ok, name, expected)

    names = {
        "scheme": "a scheme's name",
        "attention": "None or a scheme's name",
        "format": "None or a format's name",
    }
    for name, expected in names.items():
        value = getattr(config, name)
        named = isinstance(value, str) and 0 < len(value) <= 200
        optional = name != "scheme" and value is None
        require(named or optional, name, f"{expected}, at most 200 characters")
    for name in ("rank_frac", "sample_frac", "gradient_rank_frac"):
        value = getattr(config, name)
        optional = name == "gradient_rank_frac"
        number = is_int(value) or isinstance(value, float)
        ok = (optional and value is None) or (number and 0 < value <= 1)
        require(ok, name, f"{'None or ' * optional}a share, 0 < share <= 1")
    for name in ("rank", "rank_multiple"):
        require_integer(name, 1, optional=True)
    for name in ("oversample", "keep_first_blocks", "keep_last_blocks"):
        require_integer(name, 0)
    require_integer("n_iter", 0, MOST_ITERATIONS)
    require_integer("refresh_interval", 0, INT64 - 1)
    require_integer("seed", -INT64, INT64 - 1)
    require(isinstance(config.two_level, bool), "two_level", "True or False")
    split = config.split_weight
    require(split is None or isinstance(split, bool), "split_weight", "None, True or False")
    for name, choices in (("decompose", DECOMPOSABLE), ("high_precision", PASSES)):
        value = getattr(config, name)
        none = name == "decompose"
        ok = (none and value is None) or (_is_names(value) and set(value) <= set(choices))
        require(ok, name, f"{'None or ' * none}a list of any of {', '.join(choices)}")
    for name, choices in (("backend", BACKENDS), ("outer_scale", OUTER_SCALES)):
        value = getattr(config, name)
        require(isinstance(value, str) and value in choices, name, f"one of {choices}")
    for name, choices in (
        ("operand_mode", OPERAND_MODES),
        ("forward_rounding", ROUNDINGS),
        ("backward_rounding", ROUNDINGS),
        ("scale_rounding", SCALE_ROUNDINGS),
    ):
        value = getattr(config, name)
        ok = value is None or (isinstance(value, str) and value in choices)
        require(ok, name, f"None or one of {choices}")
    for name in ("target_modules", "exclude_modules"):
        value = getattr(config, name)
        optional = name == "exclude_modules" and value is None
        require(
            optional or isinstance(value, str) or _is_names(value),
            name,
            f"a string or a list of at most {MOST_NAMES:,} names",
        )
        require(value not in ((), ""), name, "at least one name")
    keep = config.modules_to_not_convert
    require(
        keep is None or (_is_names(keep) and len(keep) > 0),
        "modules_to_not_convert",
        f"None or a list of 1 to {MOST_NAMES:,} names",
    )
    _check_mappings(config)
    _check_blocks(config)
    _check_expressions(config)


def _check_mappings(config: Any) -> None:
    """Refuse mappings of layers to something that is no rank or no scheme."""
    ranks = f"integers from 1 to {LARGEST_SIZE}"
    for name, expected in (("rank_pattern", ranks), ("scheme_pattern", "names of schemes")):
        patterns = getattr(config, name)

        def is_value(value: Any, name: str = name) -> bool:
            if name == "rank_pattern":
                return is_int(value) and 1 <= value <= LARGEST_SIZE
            return isinstance(value, str) and 0 < len(value) <= 200

        if not (
            isinstance(patterns, Mapping)
            and len(patterns) <= MOST_NAMES
            and all(isinstance(k, str) and is_value(v) for k, v in patterns.items())
        ):
            raise ValueError(
                f"{name}={shown(patterns)}; expected a mapping of at most {MOST_NAMES:,} names "
                f"or regular expressions to {expected}"
            )


def _check_blocks(config: Any) -> None:
    """Refuse block indices that are none, or that PEFT's matching would silently ignore."""
    layers, pattern = config.layers_to_transform, config.layers_pattern
    named = isinstance(pattern, str) and re.fullmatch(r"[\w.]{1,200}", pattern)
    if pattern is not None and not named:
        raise ValueError(
            f"layers_pattern={shown(pattern)}; expected None or the name of a list of blocks, "
            'as "layers" or "transformer.h"'
        )
    if layers is None:
        if pattern is not None:
            raise ValueError(
                f"layers_pattern={pattern!r} without layers_to_transform has no effect; give "
                "layers_to_transform too"
            )
        return
    if not (
        isinstance(layers, tuple)
        and 0 < len(layers) <= MOST_NAMES
        and all(is_int(index) and 0 <= index <= LARGEST_SIZE for index in layers)
    ):
        raise ValueError(f"layers_to_transform={shown(layers)}; expected block indices >= 0")
    if isinstance(config.target_modules, str):
        raise ValueError(
            f"layers_to_transform={shown(list(layers))} has no effect with "
            f"target_modules={shown(config.target_modules)}: PEFT's matching looks at block "
            "indices only for a list of names. Give target_modules as a list, or put the "
            "indices into the regular expression"
        )


def _check_expressions(config: Any) -> None:
    """Refuse what is no regular expression, or would take too long to match."""
    states = 0
    for name, text in _expressions(config):
        try:
            states += getattr(_MATCHERS[name](text), "states", 0)
        except ValueError as error:
            raise ValueError(
                f"{name}={shown(text)}; expected a regular expression: {error}"
            ) from error
        if states > MAX_STATES:
            raise ValueError(
                f"{name}={shown(text)}; expected fewer or shorter regular expressions: with "
                f"this one they need more than {MAX_STATES:,} states in all. Plain names count "
                "for nothing"
            )


def _expressions(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (field, text) of everything that is matched as a regular expression."""
    for name in ("target_modules", "exclude_modules"):
        value = getattr(config, name)
        if isinstance(value, str):
            yield name, value
    for name in ("modules_to_not_convert", "rank_pattern", "scheme_pattern"):
        for text in getattr(config, name) or ():
            yield name, text


def matching_pattern(patterns: Mapping[str, Any], name: str) -> str | None:
    """Return the first pattern for a module name, by PEFT's rule: it fits the name's end."""
    return next((p for p in patterns if ending_pattern(p).match(name)), None)


def ending_pattern(text: str) -> Matcher:
    """Return the matcher of a key of `rank_pattern` or `scheme_pattern`, as PEFT writes it."""
    return name_pattern(text, before=r"(.*\.)?(", after=")$")


def containing_pattern(text: str) -> Matcher:
    """Return the matcher of an entry of `modules_to_not_convert`, as PEFT's `modules_to_save`.

    But for alternatives: each is bounded on both sides, "a|b" as ["a", "b"]. PEFT leaves one side
    of each open, and most of its second alternatives match nothing.
    """
    return name_pattern(text, before=r"(^|.*\.)(?:", after=r")($|\..*)")


_MATCHERS: dict[str, Callable[[str], Matcher]] = {
    "target_modules": name_pattern,
    "exclude_modules": name_pattern,
    "modules_to_not_convert": containing_pattern,
    "rank_pattern": ending_pattern,
    "scheme_pattern": ending_pattern,
}


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_names(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= MOST_NAMES
        and all(isinstance(item, str) for item in value)
    )
