"""Launches of Triton kernels that are compiled already, without the search that Triton makes.

`kernel[grid](...)` binds every argument by name, describes it to the compiler's backend, and finds
the compiled kernel under a text of all that: 50 to 90 microseconds for the quantizer's arguments.
The key here has what a description depends on on NVIDIA's GPUs, and nothing else. Wherever this way
fails, and with releases that nobody has read, launches are the ordinary ones.

This module imports triton, so it is imported where it is used only.
"""

from __future__ import annotations

import subprocess
from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError
from triton.runtime.errors import InterpreterError

from metis_hf.numerics.kernels.request import CompilationError, failed_kernels

_RELEASES = [(3, minor) for minor in range(6, 10)]  # in which a compiled kernel takes all arguments
_ALIGNED = 16  # bytes of a pointer, and units of an integer, that Triton looks at
_CONSTANT, _PLAIN, _DESCRIBED = range(3)  # a parameter is part of the code, or its value counts

_compiled: dict[Hashable, Any] = {}
# By the kernel's id: the kernel, and name and kind of each parameter.
_parameters: dict[int, tuple[Any, list[tuple[str, int]]]] = {}
_usable = (
    torch.version.hip is None
    and tuple(int(part) for part in triton.__version__.split(".")[:2]) in _RELEASES
)


def launch(kernel: Any, grid: tuple[int, ...], options: dict[str, Any], **arguments: Any) -> None:
    """Launch a kernel on the current device.

    Args:
        kernel: a function under `triton.jit`.
        grid: of programs.
        options: of the compiler, such as `num_warps`; the same in all launches of a kernel.
        arguments: all of the kernel's, by name.

    Raises:
        CompilationError: the kernel cannot be compiled here; nothing was launched.
    """
    global _usable
    if not _usable or not isinstance(kernel, triton.JITFunction):
        _launch_ordinary(kernel, grid, options, arguments, id(kernel))
        return
    found = _parameters.get(id(kernel))
    if found is None:
        found = _parameters[id(kernel)] = kernel, [(p.name, _kind(p)) for p in kernel.params]
    values: list[Any] = []
    described: list[Any] = [id(kernel)]
    for name, kind in found[1]:
        value = arguments[name]
        values.append(value)
        if kind == _CONSTANT or value is None:
            described += (type(value), value)  # 1, 1.0 and True are other code
        elif isinstance(value, Tensor):
            described += (value.dtype, value.get_device(), value.data_ptr() % _ALIGNED == 0)
        elif kind == _PLAIN:
            described.append(-(2**31) <= value < 2**31)
        else:
            described += (-(2**31) <= value < 2**31, value == 1, value % _ALIGNED == 0)
    key = tuple(described)
    compiled = _compiled.get(key)
    if compiled is not None:
        try:
            compiled[(*grid, 1, 1)[:3]](*values)
        except Exception:  # of Triton's own: nothing was launched, and the ordinary way says why
            _usable = False
        else:
            return
    compiled = _launch_ordinary(kernel, grid, options, arguments, key)
    if compiled is not None:
        _compiled[key] = compiled


def _launch_ordinary(
    kernel: Any,
    grid: tuple[int, ...],
    options: dict[str, Any],
    arguments: dict[str, Any],
    key: Hashable,
) -> Any:
    """Compile a kernel and launch it; one that has failed under this key is not tried again."""
    if key in failed_kernels:
        raise CompilationError(failed_kernels[key])
    try:
        return kernel[grid](**arguments, **options)
    except Exception as error:
        if not _is_of_compiler(error):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        name = getattr(kernel, "__name__", type(kernel).__name__)
        failed_kernels[key] = f"Triton {triton.__version__} cannot compile {name}: {reason[-1]}"
        raise CompilationError(failed_kernels[key]) from error


def _is_of_compiler(error: Exception) -> bool:
    """Return whether Triton, LLVM, ptxas or the C compiler has failed, and nothing has run."""
    if isinstance(error, InterpreterError):
        return False
    if isinstance(error, TritonError | OSError | subprocess.SubprocessError):
        return True
    # LLVM's passes, and "Failed to find C compiler"; a kernel that fails while it runs names its
    # device's runtime.
    of_device = any(name in str(error) for name in ("CUDA", "HIP"))
    return isinstance(error, RuntimeError) and not of_device


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def padded_block(width: int) -> int:
    """Return the least power of two that a block of so many rows fits into, 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def _kind(parameter: Any) -> int:
    if parameter.is_constexpr:
        return _CONSTANT
    return _PLAIN if parameter.do_not_specialize else _DESCRIBED
