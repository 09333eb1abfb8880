"""Bytes that an operand's making moves, counted at the dispatcher: a proxy of time on a GPU.

Every operator that is not a view counts the bytes of its tensor arguments and of its results. The
dispatcher does not see a compiled quantizer: that counts its arguments and results, and once more
the input, where its amax is found first. Caches are not modelled. Multiples are of reading the
tensor once and writing it once, as a copy does.
"""

from __future__ import annotations

import contextlib
import functools
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
    """Bytes that `call` moves, over those of a copy of `x`."""
    with use_kernels(kernels_name):
        call()  # fills caches of constants
        with counting() as count:
            call()
    return count.bytes / (2 * x.numel() * x.element_size())


class Count(TorchDispatchMode):
    """Sums the bytes of operators' inputs and outputs, and the FLOPs of large GEMMs apart.

    Args:
        gemm_from: a product of two matrices whose dimensions are all at least this large is
            limited by arithmetic: its FLOPs count, its bytes do not. None: bytes count always.
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
        if name in _PICKING:  # reads what it picks, not all that it may pick from
            self.bytes += size_of((args[1:], kwargs or {})) + 2 * size_of(out)
        elif not func.is_view and name not in FREE:
            self.bytes += size_of((args, kwargs or {})) + size_of(out)
        return out


def size_of(tree: Any) -> int:
    """Bytes of the tensors in arguments; an expanded one counts what it has in memory."""
    return sum(_bytes(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _bytes(x: Tensor) -> int:
    sizes = [size for size, stride in zip(x.shape, x.stride()) if stride != 0]
    return functools.reduce(lambda a, b: a * b, sizes, 1) * x.element_size()


@contextlib.contextmanager
def counting(gemm_from: int | None = None) -> Iterator[Count]:
    """Counts everything inside, compiled quantizers too; see `Count`."""
    run = cpu.run
    count = Count(gemm_from)

    def counted(variant: Any, key: Any, x: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        with _disable_current_modes():
            out = run(variant, key, x, *others)
        count.bytes += size_of((x, {id(other): other for other in others}, out))
        if variant.task != "unpack" and variant.two_level and others[0] is None:
            count.bytes += size_of((x, others[1]))  # for the amax
        return out

    with (
        mock.patch.object(cpu, "run", counted),
        # Under a dispatch mode quantizers leave the compiled kernels, for modes that trace.
        mock.patch.object(choice, "_get_current_dispatch_mode", return_value=None),
        count,
    ):
        yield count
