"""Compiles and loads the C++ library for CPUs, `cpu.cpp`.

The library is cached in `$XDG_CACHE_HOME/metis_hf` (`~/.cache/metis_hf`), under a hash of the
source, the compiler and the processor's instructions. `cpu` calls it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from metis_hf.numerics.kernels.request import CompilationError

_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
)
_CPU_INFO = Path("/proc/cpuinfo")
_lock = threading.Lock()


def missing() -> str | None:
    """Name the unmet requirement of the compilation; None if there is none."""
    if compiler():
        return None
    return (
        "C++ compiler (tried $CXX, g++ and clang++); install one, "
        'for example with "apt-get install g++" or "conda install cxx-compiler"'
    )


@functools.cache
def compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    candidates = [os.environ.get("CXX", ""), "g++", "clang++"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library from the cache, or compile it.

    Raises:
        CompilationError: compiling or loading failed.
    """
    with _lock:
        try:
            file = directory() / f"cpu-{_identity()}.so"
            if file.exists():
                with suppress(CompilationError):  # a damaged file is compiled again
                    return _loaded(file)
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                library = build(Path(folder) / "cpu.so")
                (Path(folder) / "cpu.so").replace(file)  # atomic: no process loads half a file
                return library
        except CompilationError:
            raise
        except (OSError, RuntimeError):  # no writable folder or no home: for this process only
            with tempfile.TemporaryDirectory() as folder:
                return build(Path(folder) / "cpu.so")


def build(out: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile the library to a file and load it.

    Args:
        out: the file to write.
        flags: compiler flags, appended to the others.

    Raises:
        CompilationError: compiling or loading failed.
    """
    found = compiler()
    if found is None:
        raise CompilationError(f"there is no {missing()}")
    error = ""
    for native in (["-march=native"], []):  # not all compilers support it on all processors
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
    for name in ("quantize", "unpack"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        function.restype = None
    word, size = ctypes.c_uint32, ctypes.c_int64
    library.draw.argtypes = [ctypes.c_void_p, size, size, word, word, ctypes.c_int]
    library.draw.restype = None
    library.use_openmp.argtypes, library.use_openmp.restype = [ctypes.c_void_p], None
    library.use_openmp(openmp())
    return library


def openmp() -> ctypes.c_void_p | None:
    """Return GOMP_parallel, which runs a function on torch's threads; None if torch has none."""
    function = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    return ctypes.cast(function, ctypes.c_void_p) if function else None


def directory() -> Path:
    """Return the folder in which compiled code is cached."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metis_hf"


@functools.cache
def _identity() -> str:
    """Return a hash of the source, the compiler and the processor's instructions."""
    made_for = (compiler(), _FLAGS, platform.machine(), _instructions())
    return hashlib.sha256(repr(made_for).encode() + _SOURCE.read_bytes()).hexdigest()[:16]


def _instructions() -> str:
    """List the processor's instructions; the library may use all and fail on other processors."""
    with suppress(OSError):
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
