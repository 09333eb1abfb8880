"""The choice of kernels: the requested ones, or the fastest that can run on a device."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from metis_hf import noise
from metis_hf.numerics.kernels import cpu, cpu_library, reference
from metis_hf.numerics.kernels.request import (
    ENVIRONMENT,
    CompilationError,
    forget_warnings,
    requested,
    warn_once,
)

# Time of the reference / time of the C++ (benchmarks/quantizers.py, 4096 x 1024, one core).
REFERENCE_SLOWER = "5 to 25"

_failed = False  # whether compiling the library for CPUs failed


def kernels_for(*tensors: Tensor) -> str:
    """Return the name of the kernels for one call; "reference" while torch.compile traces.

    Raises:
        ValueError: the requested kernels do not exist.
        RuntimeError: the requested kernels cannot run here.
    """
    chosen = requested()
    if chosen == "reference" or torch.compiler.is_compiling():
        return "reference"
    # Tensors without readable memory of their own: fake, distributed, traced or meta tensors.
    x = tensors[0]
    if any(type(t) is not Tensor for t in tensors) or _get_current_dispatch_mode() is not None:
        return "reference"
    if x.is_meta:
        return "reference"
    if chosen is None:
        return fastest(x.device)
    lacks = missing(chosen, x.device)
    if lacks:
        raise RuntimeError(
            f"kernels {chosen!r} were requested (use_kernels or {ENVIRONMENT}), but there is no "
            f"{lacks}. Without this request the reference runs, with identical results"
        )
    return chosen


def missing(kernels: str, device: torch.device) -> str | None:
    """Name the unmet requirement of these kernels on a device; None if there is none."""
    if kernels == "triton":
        triton = triton_backend()
        return "package triton" if triton is None else triton.missing(device)
    return cpu_library.missing() if device.type == "cpu" else f"C++ kernel for {device.type!r}"


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


def backend_for(*tensors: Tensor | None) -> ModuleType:
    """Return the module that `kernels_for` names; its functions are named as in `kernels`."""
    kernels = kernels_for(*(t for t in tensors if t is not None))
    if kernels == "compiled":
        try:
            cpu_library.load()
        except CompilationError as error:
            fall_back(error)
            return reference
        return cpu
    backend = triton_backend() if kernels == "triton" else reference
    assert backend is not None  # or `kernels_for` would have said so
    return backend


def noise_backend(x: Tensor) -> ModuleType | None:
    """Return the module of noise kernels for the device of `x`; None for the reference."""
    backend = backend_for(x)
    if backend is reference or backend is cpu:
        return cpu if backend is cpu else None
    from metis_hf.numerics.kernels import triton_noise

    return triton_noise


noise.use_kernels_of(noise_backend)


def fastest(device: torch.device) -> str:
    """Return the name of the fastest kernels that a device can run."""
    kernels = "triton" if device.type == "cuda" else "compiled"
    if device.type not in ("cpu", "cuda") or (kernels == "compiled" and _failed):
        return "reference"
    lacks = missing(kernels, device)
    if lacks is None:
        return kernels
    _warn_slow(f"there is no {lacks}")
    return "reference"


def fall_back(error: Exception) -> None:
    """Let the reference run on CPUs from now on, with a warning.

    Raises:
        Exception: `error`, if kernels were requested.
    """
    global _failed
    if requested() is not None:
        raise error
    _failed = True
    _warn_slow(str(error))


def forget_failures() -> None:
    """Retry the compilation at the next call, and repeat warnings already given."""
    global _failed
    _failed = False
    forget_warnings()


def _warn_slow(reason: str) -> None:
    warn_once(
        f"quantizers run uncompiled, {REFERENCE_SLOWER} times slower, with identical results: "
        f"{reason}"
    )
