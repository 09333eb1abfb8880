"""Loads of packed codes in the C++ that Inductor generates for AVX2, each by one instruction.

Eight bytes of codes, sixteen for results of 16 bits, are a part of a vector. Torch copies them into
an empty vector in memory and loads that; the processor holds the load back until the smaller stores
are done, which takes most of the time of unpacking. Here the rest of the vector is undefined: what
is generated converts the part alone.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

from metis_hf.numerics.kernels import kept

_METHOD = "_get_vec_load_line"  # of Inductor's `CppVecKernel`
# What it returns, to load the first 8 or 16 bytes of a vector of 32.
_PARTIAL = re.compile(
    r"(at::vec::Vectorized<uint8_t>)::loadu\((.*), static_cast<int64_t>\((8|16)L?\)\)"
)
_INSTRUCTIONS = {"8": "_mm_loadl_epi64", "16": "_mm_loadu_si128"}
_TAG = "metis_hf: codes loaded at once"


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Write such loads inside the block, where AVX2 is chosen and torch's own are known.

    Only in the calling thread: another one may compile something else, for other vector units.
    """
    from torch._inductor.codegen import cpp
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    kernel = getattr(cpp, "CppVecKernel", None)
    written = getattr(kernel, _METHOD, None)
    if type(pick_vec_isa()).__name__ != "VecAVX2" or written is None:
        yield
        return
    caller = threading.get_ident()

    def load_line(*args: Any, **options: Any) -> str:
        line = written(*args, **options)
        return loaded_at_once(line) if threading.get_ident() == caller else line

    setattr(kernel, _METHOD, load_line)
    try:
        with kept.told_apart(_TAG):
            yield
    finally:
        setattr(kernel, _METHOD, written)


def loaded_at_once(line: str) -> str:
    """Return C++ that loads the first bytes of a vector at once; any other line as it is."""
    found = _PARTIAL.fullmatch(line)
    if found is None:
        return line
    kind, place, count = found.groups()
    part = f"{_INSTRUCTIONS[count]}(reinterpret_cast<const __m128i*>({place}))"
    return f"{kind}(_mm256_castsi128_si256({part}))"
