"""Compiled programs on disk, each in a file of its own, beside what Inductor keeps.

Inductor's cache cannot be asked without tracing a program, which takes most of the time of reading
it. A file here is named after the program, the code that it was made from, the vector units and the
settings of the compiler, and is loaded without tracing. Where torch has no way to save a program
its file is empty: it only says that Inductor's cache has it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metis_hf.numerics.kernels import vector_units

_CPU_INFO = Path("/proc/cpuinfo")

logger = logging.getLogger(__name__)


def is_kept(program: Any) -> bool:
    """Return whether a program was compiled on this machine, with this code and this torch."""
    return _file(program).exists()


def load(program: Any) -> Callable[..., Any] | None:
    """Return a program that was kept; None where it was not, or cannot be loaded."""
    file = _file(program)
    try:
        if not file.stat().st_size:
            return None
        from torch._inductor import CompiledArtifact

        with vector_units.chosen():
            return CompiledArtifact.load(path=str(file), format="binary")
    except FileNotFoundError:
        return None
    except Exception as error:  # of another machine, or cut short: it is compiled again
        logger.debug("a compiled quantizer could not be loaded from %s: %s", file, error)
        return None


def keep(program: Any, kernel: Any) -> None:
    """Save a program that has been compiled; a disk that takes none is no error.

    Args:
        program: what it is for.
        kernel: what `torch._inductor.standalone_compile` returned.
    """
    file = _file(program)
    # Others never see a half; containers that share a disk may share a process's number too.
    written = file.with_suffix(f".{os.getpid()}-{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            kernel.save(path=str(written), format="binary")
        except Exception as error:  # not every version of torch saves every program
            logger.debug("a compiled quantizer could not be saved: %s", error)
            written.write_bytes(b"")  # whatever part of it was written
        written.replace(file)


def directory() -> Path:
    """Return where Inductor keeps compiled code."""
    from torch._inductor.codecache import cache_dir  # takes a second to import

    return Path(cache_dir())


def keeps_code() -> bool:
    """Return whether Inductor's settings let it read what it compiled earlier."""
    import torch._inductor.config as inductor

    return inductor.fx_graph_cache and not inductor.force_disable_caches


def told_apart(tag: str) -> contextlib.AbstractContextManager[Any]:
    """Let Inductor's cache keep what is compiled in the block apart from what has another tag."""
    known: Any = getattr(torch.compiler, "config", None)
    tags = getattr(known, "cache_key_tag", None)
    if tags is None:
        return contextlib.nullcontext()
    return known.patch(cache_key_tag=f"{tags}{tag}")


def _file(program: Any) -> Path:
    name = hashlib.sha256(repr(program).encode() + _settings()).hexdigest()[:32]
    return directory() / "metis_hf" / _version() / name


def _settings() -> bytes:
    """Return the settings of Inductor that change its programs."""
    import torch._inductor.config as inductor

    return inductor.get_hash()


def _instructions() -> str:
    """Name the processor's instructions: a program uses all, and would end on another processor."""
    known = torch.backends.cpu.get_cpu_capability()
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return f"{known} {platform.processor()}"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{known} {flags}"


@functools.cache
def _version() -> str:
    """Name the code that programs are made from, and the processor that they are made for."""
    numerics = Path(__file__).parents[1]
    made_for = (torch.__version__, platform.machine(), _instructions())
    digest = hashlib.sha256(repr(made_for).encode())
    for path in [*sorted(numerics.rglob("*.py")), numerics.parent / "noise.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
