"""Launches of Triton kernels that are compiled already, without the search that Triton makes.

`kernel[grid](...)` binds every argument by name, describes it to the compiler's backend, and finds
the compiled kernel under a text of all that: 50 to 90 microseconds for the quantizer's arguments.
The key here has what a description depends on on NVIDIA's GPUs, and nothing else; it is one
expression, compiled for each kernel. Wherever this way fails, and with releases that nobody has
read, launches are the ordinary ones.

This module imports triton, so it is imported where it is used only.
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

_RELEASES = [(3, minor) for minor in range(6, 10)]  # in which a compiled kernel takes all arguments
_ALIGNED = 16  # bytes of a pointer, and units of an integer, that Triton looks at

_compiled: dict[Hashable, Any] = {}
# By the kernel's id: the kernel, which keeps the id its own, and what describes its arguments.
_describers: dict[int, tuple[Any, Callable[..., tuple[Hashable, tuple[Any, ...], int]]]] = {}
_usable = (
    torch.version.hip is None
    and tuple(int(part) for part in triton.__version__.split(".")[:2]) in _RELEASES
)


def launch(kernel: Any, grid: tuple[int, ...], options: dict[str, Any], **arguments: Any) -> None:
    """Launch a kernel on the device of its tensors.

    Args:
        kernel: a function under `triton.jit`.
        grid: of programs.
        options: of the compiler, such as `num_warps`; the same in all launches of a kernel.
        arguments: all of the kernel's, by name; tensors under names that end with `_ptr`.

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
    """Launch what was compiled under this key, or compile it."""
    global _usable
    compiled = _compiled.get(key)
    if compiled is not None and _usable:
        try:
            compiled[(*grid, 1, 1)[:3]](*values)
        except Exception:  # of Triton's own: nothing was launched, and the ordinary way says why
            _usable = False
        else:
            return
    compiled = _launch_ordinary(kernel, grid, options, arguments, key)
    if compiled is not None:
        _compiled[key] = compiled


def _describer(kernel: Any) -> Callable[..., tuple[Hashable, tuple[Any, ...], int]]:
    """Return a function of a kernel's arguments that returns a key, all arguments and the device.

    Constants count by type and value, for 1, 1.0 and True are other code; tensors by dtype and
    whether they are aligned to 16 bytes; integers by what Triton makes other code of.
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
