"""The quantizers for CPUs: `cpu.cpp`, compiled once for this machine and called through ctypes.

The library is kept in `$XDG_CACHE_HOME/metis_hf` (`~/.cache/metis_hf`), under a name made of the
source, the compiler and the processor's instructions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels.formulation import BLOCK, Specialization
from metis_hf.numerics.kernels.request import CompilationError
from metis_hf.numerics.scaling import (
    EDEN_CLIP,
    LARGEST_ERROR,
    LARGEST_PRODUCT,
    SMALLEST_BASE,
    TRIED_SCALES,
    ScaleRule,
    largest_code,
    largest_value,
)

_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-pthread",
)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CPU_INFO = Path("/proc/cpuinfo")
_lock = threading.Lock()


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("tile", "rule", "two_level", "up", "stochastic")),
        *((name, ctypes.c_int32) for name in ("scaled", "rows", "in_dtype", "out_dtype", "tried")),
        ("factors", ctypes.c_float * 8),
        *((name, ctypes.c_float) for name in ("largest_value", "to_code", "clip")),
        *((name, ctypes.c_float) for name in ("smallest_base", "largest_error", "error_root")),
        *((name, ctypes.c_float) for name in ("largest_product", "product_units")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "minus", "plus", "given")),
        *((name, ctypes.c_void_p) for name in ("y", "scale", "decode")),
        *((name, ctypes.c_int64) for name in ("groups", "columns")),
        *((name, ctypes.c_uint32) for name in ("first", "second")),
    ]


def missing() -> str | None:
    """Name the part that compiling lacks; None if nothing."""
    if compiler():
        return None
    return (
        "C++ compiler (none of $CXX, g++, clang++ is found); install one, "
        'for example with "apt-get install g++" or "conda install cxx-compiler"'
    )


@functools.cache
def compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    candidates = [os.environ.get("CXX", ""), "g++", "clang++"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def run(
    variant: Specialization, key: noise.Key | None, x: Tensor, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute what `formulation.run` does, from the same arguments.

    Raises:
        CompilationError: there is no library.
    """
    library = load()
    call = _Call(x=x.data_ptr())
    if key is not None:
        call.first, call.second = noise.seeds(key)
    if variant.task == "unpack":
        out = _unpack(call, variant, x, *others)
    else:
        out = _quantize(call, variant, x, *others)
    options = _options(variant, x.dtype, x.dim() == 4)
    getattr(library, variant.task)(options, ctypes.byref(call), torch.get_num_threads())
    whole = variant.task == "quantize" and variant.scaled
    return tuple(out[:1] if whole else out)


def uniform(shape: torch.Size, key: noise.Key, device: torch.device) -> Tensor:
    """See `noise.uniform`; not empty.

    Raises:
        CompilationError: there is no library.
    """
    out = torch.empty(shape, dtype=torch.float32, device=device)
    width = shape[-1] if shape else 1
    rows = out.numel() // width
    load().draw(out.data_ptr(), rows, width, *noise.seeds(key), torch.get_num_threads())
    return out


def _quantize(
    call: _Call,
    variant: Specialization,
    x: Tensor,
    given: Tensor | None = None,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
) -> list[Tensor]:
    _set_shape(call, x)
    call.minus, call.given = _place(minus), _place(given)
    call.plus = call.minus if variant.same else _place(plus)
    packs = variant.task == "pack"
    if packs:
        halved = (x.shape[0], BLOCK) if x.dim() == 3 else (x.shape[0], BLOCK // 2, *x.shape[2:])
        shape = [1 if dim in variant.dims else size for dim, size in enumerate(x.shape)]
        scale = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cpu")
        out = [torch.empty(halved, dtype=torch.uint8, device="cpu"), scale]
        call.scale = scale.data_ptr()
    else:
        out = [torch.empty(x.shape, dtype=variant.dtype, device="cpu")]
    call.y = out[0].data_ptr()
    if variant.two_level:
        like = given.shape if given is not None else ()
        decode = torch.empty(like, dtype=torch.float32, device="cpu")
        call.decode = decode.data_ptr()
        out.append(decode)
    return out


def _unpack(
    call: _Call,
    variant: Specialization,
    codes: Tensor,
    scale: Tensor | None = None,
    decode: Tensor | None = None,
    plus: Tensor | None = None,
) -> list[Tensor]:
    apart = (2, BLOCK) if codes.dim() == 2 else (BLOCK, *codes.shape[2:])
    shape = (codes.shape[0], *apart)
    out = torch.empty(shape, dtype=variant.dtype, device="cpu")
    _set_shape(call, out)
    call.y, call.scale = out.data_ptr(), _place(scale)
    call.given, call.plus = _place(decode), _place(plus)
    return [out]


def _place(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _set_shape(call: _Call, x: Tensor) -> None:
    if x.dim() == 4:
        call.groups, call.columns = x.shape[0], x.shape[2]
    else:
        call.groups, call.columns = x.numel() // BLOCK, 1


@functools.lru_cache(maxsize=1024)
def _options(variant: Specialization, dtype: torch.dtype, across_rows: bool) -> Any:
    rule = variant.rule
    tried = TRIED_SCALES.get(rule, ())
    square = len(variant.dims) > 1
    count = BLOCK * BLOCK if square else BLOCK
    return ctypes.byref(
        _Options(
            tile=2 if square else int(across_rows),
            rule=1 if tried else 2 if rule is ScaleRule.EDEN else 0,
            two_level=variant.two_level,
            up=variant.scale_up,
            stochastic=variant.stochastic,
            scaled=variant.scaled,
            rows=variant.rows,
            in_dtype=_DTYPES.get(dtype, 0),
            out_dtype=_DTYPES[variant.dtype],
            tried=len(tried),
            factors=tried,
            largest_value=largest_value(NVFP4, rule),
            to_code=1 / largest_code(NVFP4, rule),
            clip=EDEN_CLIP,
            smallest_base=SMALLEST_BASE,
            largest_error=2.0**24 / count,
            error_root=math.sqrt(2.0**24 / LARGEST_ERROR / count),
            largest_product=LARGEST_PRODUCT,
            product_units=2.0**30 / LARGEST_PRODUCT / count,
        )
    )


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library, after compiling it where this machine has none.

    Raises:
        CompilationError: that failed.
    """
    with _lock:
        try:
            file = directory() / f"cpu-{_identity()}.so"
            if file.exists():
                with suppress(CompilationError):  # damaged: compiled again
                    return _loaded(file)
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                library = build(Path(folder) / "cpu.so")
                (Path(folder) / "cpu.so").replace(file)  # others never see a half
                return library
        except CompilationError:
            raise
        except (OSError, RuntimeError):  # no folder that takes one, or no home: for this process
            with tempfile.TemporaryDirectory() as folder:
                return build(Path(folder) / "cpu.so")


def build(out: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile the library to a file and load it.

    Args:
        out: the file.
        flags: for the compiler, after all others.

    Raises:
        CompilationError: that failed.
    """
    found = compiler()
    if found is None:
        raise CompilationError(f"there is no {missing()}")
    error = ""
    for native in (["-march=native"], []):  # not every compiler knows it for every processor
        command = [found, *_FLAGS, *native, *flags, str(_SOURCE), "-o", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as failure:
            raise CompilationError(f"{found} could not be started: {failure}") from failure
        if not done.returncode:
            return _loaded(out)
        error = error or done.stderr.strip()
    raise CompilationError(f"{found} failed to compile {_SOURCE}: {error}")


def _loaded(file: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise CompilationError(f"quantizers could not be compiled or loaded: {error}") from error
    for name in ("quantize", "pack", "unpack"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        function.restype = None
    word, size = ctypes.c_uint32, ctypes.c_int64
    library.draw.argtypes = [ctypes.c_void_p, size, size, word, word, ctypes.c_int]
    library.draw.restype = None
    return library


def directory() -> Path:
    """Return where compiled code is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metis_hf"


@functools.cache
def _identity() -> str:
    """Return a name for the source, the compiler and the processor's instructions."""
    made_for = (compiler(), _FLAGS, platform.machine(), _instructions())
    return hashlib.sha256(repr(made_for).encode() + _SOURCE.read_bytes()).hexdigest()[:16]


def _instructions() -> str:
    """Name the processor's instructions: the library uses all, and fails on another processor."""
    with suppress(OSError):
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
