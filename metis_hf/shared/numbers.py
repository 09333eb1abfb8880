"""Human-readable numbers: three digits and a unit."""

from __future__ import annotations

_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z")
_COUNTS = ("", "k", "M", "B", "T")


def si(value: float, unit: str) -> str:
    """Return a number with three digits and a decimal prefix: si(4.1e9, "B") = "4.1 GB"."""
    return "{} {}".format(*_scaled(value, _DECIMAL)) + unit


def short_number(count: float) -> str:
    """Return a count in three digits: 320k, 3.19M, 1B."""
    return "".join(_scaled(count, _COUNTS))


def gib(value: float) -> str:
    """Return a number of bytes in GiB, or in MiB below 1 GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def _scaled(value: float, prefixes: tuple[str, ...]) -> tuple[str, str]:
    """Return (three digits, prefix) after rounding: 999,600 gives ("1", "M")."""
    rounded = float(f"{value:.3g}")
    step = max(i for i in range(len(prefixes)) if i == 0 or abs(rounded) >= 1000**i)
    return f"{rounded / 1000**step:.3g}", prefixes[step]
