"""The user's request for kernels, and the kernels that failed to compile."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Hashable, Iterator
from typing import Any

KERNELS = ("reference", "compiled", "triton")
ENVIRONMENT = "METIS_KERNELS"

failed_kernels: dict[Hashable, str] = {}  # Triton's: key of the launch -> reason
_chosen: str | None = os.environ.get(ENVIRONMENT) or None  # None: automatic
_warned: set[str] = set()


class CompilationError(RuntimeError):
    """Raised when kernels cannot be compiled or loaded."""


def requested() -> str | None:
    """Return the name of the requested kernels; None if the choice is automatic.

    Raises:
        ValueError: the requested kernels do not exist.
    """
    _check(_chosen)
    return _chosen


@contextlib.contextmanager
def use_kernels(kernels: str | None) -> Iterator[None]:
    """Choose the implementation inside a `with` block, for all threads of the process.

    Args:
        kernels: "reference", "compiled", "triton", or None for the automatic choice.

    Raises:
        ValueError: unknown name.
    """
    global _chosen
    _check(kernels)
    before, _chosen = _chosen, kernels
    try:
        yield
    finally:
        _chosen = before


def _check(kernels: str | None) -> None:
    if kernels is not None and kernels not in KERNELS:
        raise ValueError(
            f"kernels {kernels!r} do not exist; choose one of {', '.join(KERNELS)} "
            f"in use_kernels or in the environment variable {ENVIRONMENT}"
        )


class _OrReference:
    """Context manager: turns a kernel's CompilationError into one warning.

    The code after the block then falls back to the reference. If the user requested kernels, the
    error propagates instead.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> bool:
        if kind is None or not issubclass(kind, CompilationError) or _chosen is not None:
            return False
        warn_once(
            "a kernel cannot be compiled, so the slower reference runs instead; sums may differ in "
            f"their last bits: {error}"
        )
        return True


or_reference = _OrReference()


def forget_warnings() -> None:
    """Retry failed kernels at the next call, and repeat warnings already given."""
    failed_kernels.clear()
    _warned.clear()


def warn_once(message: str) -> None:
    """Warn, unless the same warning was given before."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=5)
