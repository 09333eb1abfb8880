"""Checks of a record before it is shown on a page.

Each check returns the record, or raises `Malformed` with what is wrong with it. NaN and infinity
are numbers here, since a run that diverged has them; text, lists and null in their place are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from metis_hf.training.run_record import LAST_STEP, is_step

# The largest finite number that a training run in fp32 can log.
LARGEST = 3.5e38
LOG_NUMBERS = ("loss", "eval_loss", "grad_norm", "learning_rate", "step_seconds")
REFRESH_STATISTICS = ("orthogonality", "narrowing", "energy")


class Malformed(ValueError):
    """A record that cannot be shown; the message says what is wrong with it."""


def number(value: Any, what: str) -> float:
    """Return a number as it is.

    Raises:
        Malformed: it is of another type, or finite and beyond what fp32 holds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{what} is {_shown(value)}, no number")
    if (isinstance(value, int) or math.isfinite(value)) and abs(value) > LARGEST:
        raise Malformed(f"{what} is beyond the range of fp32")
    return value


def is_text(value: Any) -> bool:
    """Return whether a value is text that can be written in UTF-8 and has a visible character."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not any(0xD800 <= ord(character) < 0xE000 for character in value)


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is a whole number from 0 up that 64 bits hold."""
    return isinstance(value, int) and 0 <= value <= 2**63


def log_entry(entry: Any) -> dict[str, Any]:
    """Return an entry of Trainer's log history without its nulls."""
    fields = _mapping(entry, "the entry")
    if not is_step(fields.get("step")):
        raise Malformed(f"its step is {_shown(fields.get('step'))}, none from 0 to {LAST_STEP:,}")
    fields = {key: value for key, value in fields.items() if value is not None}
    for name in (*LOG_NUMBERS, *evaluation_losses(fields).values()):
        if name in fields:
            number(fields[name], name)
    return fields


def evaluation_losses(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of evaluation losses in a log entry, by that of their set, "" for the one.

    Trainer logs those of several sets as `eval_<set>_loss`.
    """
    found = {}
    for name in entry:
        if name == "eval_loss":
            found[""] = name
        elif name.startswith("eval_") and name.endswith("_loss"):
            found[name.removeprefix("eval_").removesuffix("_loss")] = name
    return found


def layers(value: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Return the statistics of a step: layer -> tensor -> statistic -> number."""
    return _by_layer(value, _tensors)


def noise(value: Any) -> dict[str, tuple[float, float]]:
    """Return the norms of a step: layer -> (weight gradient, quantization noise in it)."""
    return _by_layer(value, _norms)


def refresh(value: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Return what a refresh changed: layer -> "before" and "after" -> statistic -> number.

    Of a layer that was not measured there is nothing.
    """
    return _by_layer(value, _moments)


def switch(value: Any) -> dict[str, Any]:
    """Return what the precision was switched to: "scheme" and a list "high_precision"."""
    found = _mapping(value, "it")
    passes = found.get("high_precision") or []
    if not isinstance(passes, list) or not all(is_text(name) for name in passes):
        raise Malformed(f"high_precision is {_shown(passes)}, no list of names")
    if not is_text(found.get("scheme")):
        raise Malformed(f"scheme is {_shown(found.get('scheme'))}, no name")
    return found


# Parts of a line of the health file, and the check of each.
PARTS: dict[str, Callable[[Any], Any]] = {
    "layers": layers,
    "noise": noise,
    "refresh": refresh,
    "switch": switch,
}


def _by_layer(value: Any, check: Callable[[str, Any], Any]) -> dict[str, Any]:
    found = _mapping(value, "it")
    if not found:
        raise Malformed("it has no layer")
    for name in found:
        if not is_text(name):
            raise Malformed(f"{_shown(name)} is no name of a layer")
    return {name: check(name, part) for name, part in found.items()}


def _tensors(layer: str, value: Any) -> dict[str, dict[str, float]]:
    return {
        tensor: _numbers(stats, f"{layer}, {tensor}")
        for tensor, stats in _mapping(value, layer).items()
    }


def _moments(layer: str, value: Any) -> dict[str, dict[str, float]]:
    moments = _mapping(value, layer)
    found: dict[str, dict[str, float]] = {}
    for moment in ("before", "after") if moments else ():
        stats = _numbers(moments.get(moment), f"{layer}, {moment}")
        missing = [name for name in REFRESH_STATISTICS if name not in stats]
        if missing:
            raise Malformed(f"{layer}, {moment} lacks {', '.join(missing)}")
        found[moment] = stats
    return found


def _norms(layer: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise Malformed(f"{layer} is {_shown(value)}, no pair of norms")
    gradient, noise = (number(norm, layer) for norm in value)
    if gradient < 0 or noise <= 0:
        raise Malformed(f"{layer} is {_shown(value)}: a norm below 0, or no noise")
    return gradient, noise


def _numbers(value: Any, what: str) -> dict[str, float]:
    return {name: number(v, f"{what}, {name}") for name, v in _mapping(value, what).items()}


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Malformed(f"{what} is {_shown(value)}, no object")
    return dict(value)


def _shown(value: Any) -> str:
    """Return a value as a note shows it: short, and without what no page can hold."""
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
