"""The choice of kernels: those asked for, or the fastest that can run on a device."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from metis_hf import noise
from metis_hf.numerics.kernels import cpu

KERNELS = ("reference", "compiled", "triton")
ENVIRONMENT = "METIS_KERNELS"
# benchmarks/quantizers.py: reference over compiled, 4096 x 1024, one core.
REFERENCE_SLOWER = "4 to 12"

_chosen: str | None = os.environ.get(ENVIRONMENT) or None  # None: automatic
_warned: set[str] = set()
_failed = False  # the compilation of the library for CPUs


@contextlib.contextmanager
def use_kernels(kernels: str | None) -> Iterator[None]:
    """Choose the implementation inside a `with` block, for all threads of the process.

    Args:
        kernels: "reference", "compiled", "triton", or None for the automatic choice.

    Raises:
        ValueError: another name.
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
            f"(in the environment variable {ENVIRONMENT} too)"
        )


def kernels_for(*tensors: Tensor) -> str:
    """Return the kernels for one call; "traced" inside torch.compile, which compiles them itself.

    Raises:
        ValueError: those asked for do not exist.
        RuntimeError: they cannot run here.
    """
    if _chosen == "reference":
        return "reference"
    if torch.compiler.is_compiling():
        return "traced"
    _check(_chosen)
    # Tensors that only stand for tensors: fake ones, distributed ones, ones of a tracing mode or
    # without storage.
    x = tensors[0]
    if any(type(t) is not Tensor for t in tensors) or _get_current_dispatch_mode() is not None:
        return "reference"
    if x.is_meta:
        return "reference"
    if _chosen is None:
        return fastest(x.device)
    lacks = missing(_chosen, x.device)
    if lacks:
        raise RuntimeError(
            f"kernels {_chosen!r} were asked for (use_kernels or {ENVIRONMENT}), and there is no "
            f"{lacks}. Without the request the reference runs, with equal results"
        )
    return _chosen


def missing(kernels: str, device: torch.device) -> str | None:
    """Name the part that kernels lack on this device; None if nothing."""
    if kernels == "triton":
        triton = triton_backend()
        return "package triton" if triton is None else triton.missing(device)
    return cpu.missing() if device.type == "cpu" else f"C++ for {device.type!r} devices"


@functools.cache
def triton_backend() -> ModuleType | None:
    """Import the Triton kernels on first use; None where triton is not installed."""
    try:
        from metis_hf.numerics.kernels import triton_launch
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return triton_launch


def noise_backend(x: Tensor) -> ModuleType | None:
    """Import the Triton kernels that draw noise where `x` is, if Triton's are in force there."""
    if kernels_for(x) != "triton":
        return None
    from metis_hf.numerics.kernels import triton_noise

    return triton_noise


noise.use_kernels_of(noise_backend)


def fastest(device: torch.device) -> str:
    """Return the kernels of the automatic choice: the fastest that a device can run."""
    kernels = "triton" if device.type == "cuda" else "compiled"
    if device.type not in ("cpu", "cuda") or (kernels == "compiled" and _failed):
        return "reference"
    lacks = missing(kernels, device)
    if lacks is None:
        return kernels
    _warn_slow(f"there is no {lacks}")
    return "reference"


def fall_back(error: Exception) -> None:
    """Let the reference run on CPUs from now on, unless compiled kernels were asked for.

    Raises:
        Exception: they were.
    """
    global _failed
    if _chosen is not None:
        raise error
    _failed = True
    _warn_slow(str(error))


def forget_failures() -> None:
    """Try the compilation again at the next call, and repeat warnings that were given before."""
    global _failed
    _failed = False
    _warned.clear()


def _warn_slow(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"quantizers run uncompiled, {REFERENCE_SLOWER} times slower, with equal results: "
            f"{reason}",
            stacklevel=4,
        )
