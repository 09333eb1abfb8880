"""Count the bytes moved to make an operand, at the dispatcher: a proxy for time on a GPU.

Every operator that is not a view counts the bytes of its tensor arguments and results. A compiled
quantizer is invisible to the dispatcher: it counts its arguments and results, and the input once
more if it first finds the amax. Caches are not modeled. Multiples are relative to a copy, which
reads the tensor once and writes it once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from metis_hf.numerics.kernels import choice, cpu, use_kernels

_PICKING = ("index", "index_select", "gather")
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view")


def multiple(call: Callable[[], object], x: Tensor, kernels_name: str) -> float:
    """Return the bytes that `call` moves, over the bytes of a copy of `x`."""
    with use_kernels(kernels_name):
        call()  # fills caches of constants
        with counting() as count:
            call()
    return count.bytes / (2 * x.numel() * x.element_size())


class Count(TorchDispatchMode):
    """Sums the bytes of operators' inputs and outputs, and separately the FLOPs of large GEMMs.

    Args:
        gemm_from: a GEMM with all dimensions at least this large is compute-bound: its FLOPs are
            counted instead of its bytes. None: bytes always count.
    """

    def __init__(self, gemm_from: int | None = None) -> None:
        super().__init__()
        self.bytes = 0
        self.gemm_flops = 0
        self.gemm_from = gemm_from

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "mm" and self.gemm_from is not None:
            sizes = (*args[0].shape, args[1].shape[1])
            if min(sizes) >= self.gemm_from:
                self.gemm_flops += 2 * sizes[0] * sizes[1] * sizes[2]
                return out
        if name in _PICKING:  # reads only the selected elements
            self.bytes += size_of((args[1:], kwargs or {})) + 2 * size_of(out)
        elif not func.is_view and name not in FREE:
            self.bytes += size_of((args, kwargs or {})) + size_of(out)
        return out


def size_of(tree: Any) -> int:
    """Return the bytes of the tensors in a tree; expanded dimensions count once."""
    return sum(_bytes(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _bytes(x: Tensor) -> int:
    sizes = [size for size, stride in zip(x.shape, x.stride()) if stride != 0]
    return math.prod(sizes) * x.element_size()


@contextlib.contextmanager
def counting(gemm_from: int | None = None) -> Iterator[Count]:
    """Count all operators inside the block, compiled quantizers included; see `Count`."""
    run = cpu.run
    count = Count(gemm_from)

    def counted(task: str, *options: Any, **tensors: Tensor | None) -> None:
        with _disable_current_modes():
            run(task, *options, **tensors)
        count.bytes += size_of({id(tensor): tensor for tensor in tensors.values()})
        if tensors.get("decode") is not None and tensors["given"] is None:
            count.bytes += size_of((tensors["x"], tensors["minus"]))  # the pass that finds the amax

    with (
        mock.patch.object(cpu, "run", counted),
        # Under a dispatch mode, which may trace, quantizers do not use the compiled kernels.
        mock.patch.object(choice, "_get_current_dispatch_mode", return_value=None),
        count,
    ):
        yield count
