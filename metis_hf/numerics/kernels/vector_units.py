"""The vector units that Inductor generates C++ for: of 256 bits, those that the processor has.

Before its first kernel, Inductor compiles a program for each kind of vector units and starts it in
a process of its own, to see whether compiler and torch know them: seconds, in every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_KNOWN = "cpp.vec_isa_ok"  # None: try them out
_WIDTH = "cpp.simdlen"  # None: the widest
# A block of 16 elements is two vectors of AVX2, whose halves one operation combines; in a vector of
# AVX-512 that takes shuffles. Measured on a processor with both (docs/performance.md).
_BITS = 256


def may_be_trusted() -> bool:
    """Return whether trying them out can be left out, and nobody has set that already."""
    return _setting(_KNOWN, None)


@contextlib.contextmanager
def chosen(*, tried: bool = False) -> Iterator[None]:
    """Choose vector units inside the block; what is set already, or cannot be, stays as it is.

    After the block Inductor tries them out as ever, for programs that are not of this package.

    Args:
        tried: leave it to Inductor to try them out. If not, what is compiled in the block may fail.
    """
    import torch._inductor.config as inductor
    from torch._inductor import cpu_vec_isa

    options: dict[str, Any] = {}
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and _setting(_WIDTH, None):
        options[_WIDTH] = _BITS
    if tried or not may_be_trusted():
        with inductor.patch(options):
            yield
        return
    options[_KNOWN] = True
    known = cpu_vec_isa.supported_vec_isa_list
    if _WIDTH in options:  # extensions of AVX-512 are tried out whatever `_KNOWN` says
        cpu_vec_isa.supported_vec_isa_list = [isa for isa in known if isa.bit_width() == _BITS]
    try:
        with inductor.patch(options):
            yield
    finally:
        cpu_vec_isa.supported_vec_isa_list = known
        getattr(cpu_vec_isa.valid_vec_isa_list, "cache_clear", lambda: None)()


def _setting(name: str, value: object) -> bool:
    """Return whether this version of Inductor has a setting, and it is this."""
    import torch._inductor.config as inductor

    known = inductor.get_config_copy()
    return name in known and known[name] == value
