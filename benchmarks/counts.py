"""Count the launches of a layer's forward and backward pass on CUDA, on a machine without a GPU.

    python benchmarks/counts.py            # half a minute

The layer runs the CUDA code path in bf16 with CPU operations, and launches no Triton kernel: the
outputs of the kernels stay uninitialized. Triton launches are counted by kernel and torch
operations by name. Each operation that is not a view or a mere allocation counts as one, even if
torch launches several kernels for it. So a GPU profiler shows a few more: cuBLAS clears a workspace
before a GEMM, for example. The time is measured on a small layer and is nearly all Python and
dispatcher overhead, without Triton's launch overhead.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import layer
import torch
import triton
from timing import short, table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from traffic import FREE

from metis_hf import noise
from metis_hf.numerics.kernels import choice, triton_noise
from metis_hf.training.layer_states import after_step

SHAPE = (2048, 768, 768)  # tokens, in_features, out_features
TIMED_SHAPE = (64, 64, 64)
FP4 = ("nvfp4-rne", "w4a4", "nvidia", "four-over-six", "quartet2", "metis", layer.KEPT)
SCHEMES = (layer.NN_LINEAR, *FP4)
ROUNDS = 20


class Launches(TorchDispatchMode):
    """Counts operations that start a kernel, and Triton launches, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.torch: Counter[str] = Counter()
        self.triton: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            self.torch[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """Return the number of launches and operations together."""
        return self.torch.total() + self.triton.total()


class Compiled:
    """Stand-in for a compiled kernel, which `on_cuda` counts and does not launch."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Compiled:
        return self

    def __call__(self, *args: object) -> None:
        raise AssertionError("launched outside of `on_cuda`")


@contextlib.contextmanager
def on_cuda(count: Launches | None = None) -> Iterator[None]:
    """Make CPU tensors take the CUDA code path, without launching anything."""
    mm, kernels_for = torch.mm, choice.kernels_for

    def launch(kernel: triton.JITFunction, *args: object, **options: object) -> Compiled:
        if count is not None:
            count.triton[kernel.__name__] += 1
        return Compiled(kernel)

    def launch_compiled(compiled: Compiled, *args: object) -> None:
        if count is not None:
            count.triton[compiled.kernel.__name__] += 1

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype is None:
            return mm(a, b)
        if count is not None:  # the CPU has no mm with out_dtype
            count.torch["mm"] += 1
        return torch.empty(len(a), b.shape[1], dtype=out_dtype)

    with contextlib.ExitStack() as stack:

        def replace(owner: object, name: str, other: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, other))

        for module in list(sys.modules.values()):
            if vars(module).get("kernels_for") is kernels_for:
                replace(module, "kernels_for", lambda *tensors: "triton")
        replace(noise, "_on_host", lambda data: False)
        replace(noise, "one_launch", lambda x: triton_noise)
        replace(triton.JITFunction, "run", launch)
        replace(Compiled, "__call__", launch_compiled)
        replace(torch, "mm", product)
        if count is not None:
            stack.enter_context(count)
        yield


def step_of(scheme: str, shape: tuple[int, int, int] = SHAPE) -> Callable[[], None]:
    """Return a forward and backward pass of one layer, with a new input tensor in each call."""
    tokens, inputs, outputs = shape
    linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    module = linear if scheme == layer.NN_LINEAR else layer.converted(linear, scheme)
    dy = torch.empty(tokens, outputs, dtype=torch.bfloat16)

    def step() -> None:
        x = torch.empty(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
        module(x).backward(dy)
        module.zero_grad()
        if scheme == layer.KEPT:
            after_step(module, 1, 1)

    return step


def launches(scheme: str, shape: tuple[int, int, int] = SHAPE) -> Launches:
    """Count the second step; the first one creates constants and finds kept subspaces."""
    step, count = step_of(scheme, shape), Launches()
    with on_cuda():
        step()
    with on_cuda(count):
        step()
    return count


def python_ms(
    scheme: str, shape: tuple[int, int, int] = TIMED_SHAPE, rounds: int = ROUNDS
) -> float:
    """Return the time of the fastest step, the one least disturbed by other processes."""
    step, times = step_of(scheme, shape), []
    with on_cuda():
        for _ in range(rounds):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    parser.add_argument(
        "--names", action="store_true", help="also print the name of each kernel and operation"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for scheme in args.schemes:
        count = launches(scheme)
        started = count.triton.total(), count.torch.total(), count.total
        rows.append([scheme, *started, short(python_ms(scheme))])
        if args.names:
            named = [*count.triton.most_common(), *count.torch.most_common()]
            print(f"{scheme}: {', '.join(f'{number} {name}' for name, number in named)}")
    print(table(["scheme", "Triton", "torch", "together", "Python, ms"], rows))


if __name__ == "__main__":
    main()
