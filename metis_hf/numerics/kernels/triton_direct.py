"""Launches of compiled Triton kernels with little overhead, on NVIDIA GPUs.

The ordinary launch `kernel[grid](...)` binds every argument by name, describes it to the compiler's
backend, and looks up the compiled kernel under a string of all descriptions: 50 to 90 microseconds
for the quantizers' arguments. `launch` uses a key that holds only the properties of arguments on
which compiled code depends on NVIDIA GPUs; one generated expression per kernel computes the key. If
this launch fails, and on Triton releases outside `_RELEASES`, `launch` uses the ordinary one.

This module imports triton; import it only where it is used.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from triton.errors import TritonError
from triton.runtime.errors import InterpreterError

from metis_hf.numerics.kernels.request import CompilationError, failed_kernels

_RELEASES = [(3, minor) for minor in range(6, 10)]  # whose compiled kernels take all arguments

_compiled: dict[Hashable, Any] = {}
# By the kernel's id: the kernel, kept alive so that the id stays unique, and its describer.
_describers: dict[int, tuple[Any, Callable[..., tuple[Hashable, tuple[Any, ...], int]]]] = {}
_usable = (
    torch.version.hip is None
    and tuple(int(part) for part in triton.__version__.split(".")[:2]) in _RELEASES
)


def launch(kernel: Any, grid: tuple[int, ...], options: dict[str, Any], **arguments: Any) -> None:
    """Launch a kernel on the device of its tensors.

    Args:
        kernel: a function under `triton.jit`.
        grid: number of programs along each axis.
        options: compiler options, such as `num_warps`; they are not part of the key and must depend
            only on the kernel and its constants.
        arguments: all arguments of the kernel, by name; names of tensors end with `_ptr`.

    Raises:
        CompilationError: the kernel cannot be compiled here; nothing was launched.
    """
    if not isinstance(kernel, triton.JITFunction):  # it is interpreted
        _launch_ordinary(kernel, grid, options, arguments, id(kernel))
        return
    found = _describers.get(id(kernel))
    if found is None:
        found = _describers[id(kernel)] = kernel, _describer(kernel)
    key, values, device = found[1](**arguments)
    key = id(kernel), device, key
    if device < 0 or device == torch.cuda.current_device():
        _launch_compiled(kernel, grid, options, arguments, key, values)
        return
    with torch.cuda.device(device):
        _launch_compiled(kernel, grid, options, arguments, key, values)


def _launch_compiled(
    kernel: Any,
    grid: tuple[int, ...],
    options: dict[str, Any],
    arguments: dict[str, Any],
    key: Hashable,
    values: tuple[Any, ...],
) -> None:
    """Launch the kernel compiled under this key, or compile and launch it."""
    global _usable
    compiled = _compiled.get(key)
    if compiled is not None and _usable:
        try:
            compiled[(*grid, 1, 1)[:3]](*values)
        except Exception:  # Triton's own: nothing was launched; the ordinary launch says why
            _usable = False
        else:
            return
    compiled = _launch_ordinary(kernel, grid, options, arguments, key)
    if compiled is not None:
        _compiled[key] = compiled


def _describer(kernel: Any) -> Callable[..., tuple[Hashable, tuple[Any, ...], int]]:
    """Return a function from a kernel's arguments to (key, all arguments, device index).

    The key has the type and value of constants, since 1, 1.0 and True compile to different code;
    the dtype and the 16-byte alignment of tensors; and the properties of integers for which Triton
    compiles different code.
    """
    parts, names = [], [parameter.name for parameter in kernel.params]
    for parameter in kernel.params:
        x = parameter.name
        if parameter.is_constexpr:
            parts.append(f"type({x}), {x}")
        elif x.endswith("_ptr"):
            parts.append(f"{x} if {x} is None else ({x}.dtype, {x}.data_ptr() % 16 == 0)")
        elif parameter.do_not_specialize:
            parts.append(f"{x} if {x} is None else -(2**31) <= {x} < 2**31")
        else:
            described = f"-(2**31) <= {x} < 2**31, {x} == 1, {x} % 16 == 0"
            parts.append(f"{x} if {x} is None else ({described})")
    first = "".join(f"{x} if {x} is not None else " for x in names if x.endswith("_ptr")) + "None"
    key, values = ", ".join(parts), ", ".join(names)
    return eval(f"lambda {values}: (({key},), ({values},), ({first}).get_device())")


def _launch_ordinary(
    kernel: Any,
    grid: tuple[int, ...],
    options: dict[str, Any],
    arguments: dict[str, Any],
    key: Hashable,
) -> Any:
    """Compile and launch a kernel; fail at once if it has failed before under this key."""
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
    """Return whether Triton, LLVM, ptxas or the C compiler failed, before anything ran."""
    if isinstance(error, InterpreterError):
        return False
    if isinstance(error, TritonError | OSError | subprocess.SubprocessError):
        return True
    # LLVM's passes, and "Failed to find C compiler", raise RuntimeError. The message of a kernel
    # that fails while it runs names the device's runtime.
    of_device = any(name in str(error) for name in ("CUDA", "HIP"))
    return isinstance(error, RuntimeError) and not of_device


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def padded_block(width: int) -> int:
    """Return the smallest power of two >= `width`, at least 16."""
    return max(16, 1 << (width - 1).bit_length())
