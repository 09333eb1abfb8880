"""Which vector units Inductor generates C++ for: those that the processor has, untried.

Before its first kernel, Inductor compiles a program for each kind of vector units and starts it in
a process of its own, to see whether compiler and torch know them: seconds, in every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_OPTION = "cpp.vec_isa_ok"  # None: try them out


def may_be_trusted() -> bool:
    """Return whether trying them out can be left out, and nobody has set that already."""
    import torch._inductor.config as inductor

    return inductor.get_config_copy().get(_OPTION, True) is None


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Take vector units for good inside the block; where this cannot be set, change nothing.

    What is compiled in the block may fail for it. After the block Inductor tries them out as ever,
    for programs that are not of this package.
    """
    if not may_be_trusted():
        yield
        return
    import torch._inductor.config as inductor
    from torch._inductor import cpu_vec_isa

    try:
        with inductor.patch({_OPTION: True}):
            yield
    finally:
        getattr(cpu_vec_isa.valid_vec_isa_list, "cache_clear", lambda: None)()
