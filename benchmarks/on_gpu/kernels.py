"""The part `kernels`: bits and bandwidth of quantizers, and times of the work around GEMMs.

Imports are inside functions, so that a missing package fails only this part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from timing import Row, dtype_name, interleave, summary, synchronize
from torch import Tensor

from on_gpu.context import TOKENS, Context
from on_gpu.record import FAILURES, Item, free_memory, text_of

SHAPES = [(16384, 8192), (8192, 4096)]
QUICK_SHAPES = [(256, 256)]
DIRECTIONS = 48  # directions of an input of width 768 under `metis`
Case = tuple[Row, Callable[[], object]]
_BURST = 10e-3  # seconds of back-to-back calls, which hide Python's launch overhead


def kernels(context: Context) -> Iterator[Item]:
    import quantizers

    names = list(quantizers.QUANTIZERS)[: 3 if context.quick else None]
    for dtype in quantizers.DTYPES:
        yield Item(f"bits, {dtype_name(dtype)}", partial(equal_bits, names, dtype, context.device))
    for shape in QUICK_SHAPES if context.quick else SHAPES:
        for dtype in quantizers.DTYPES:
            key = f"{shape[0]} x {shape[1]}, {dtype_name(dtype)}"
            yield Item(key, partial(bandwidth, names, shape, dtype, context))
    shape = QUICK_SHAPES[0] if context.quick else (2 * TOKENS, 3072)
    yield Item("around GEMMs", partial(around_gemms, shape, context))


def hard_tensors() -> dict[str, Tensor]:
    """Return fp32 tensors on the CPU that are most likely to expose differences in kernels."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 768, generator=generator)
    exponents = torch.rand(512, 1, generator=generator) * 80 - 40
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(64, 12)
    return {
        "normal": normal,
        "rows from 2^-40 to 2^40": normal * torch.exp2(exponents),
        "ties": torch.where(normal[:64, :96] < 0, -ties, ties),
        "subnormal": normal[:64] * 1e-40,
        "zeros": torch.zeros(32, 32),
        "33 x 48": normal[:33, :48].contiguous(),
    }


def equal_bits(names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Row:
    """Compare the bits of all kernels here with the reference on the CPU."""
    import quantizers

    rows: list[Row] = []
    wrong: list[str] = []
    pairs = [
        (n, k) for n in names for k in quantizers.available(device) if quantizers.covered(n, k)
    ]
    with torch.no_grad():
        for name, kernel in pairs:
            differing = {}
            try:
                for title, values in hard_tensors().items():
                    x = values.to(dtype)
                    wanted = quantizers.ours(x, name, "reference")()
                    found = quantizers.ours(x.to(device), name, kernel)().cpu()
                    differing[title] = int((_bits(found) != _bits(wanted)).sum())
            except Exception as error:  # continue with the other kernels
                wrong.append(f"{name}, {kernel}: {text_of(error)}")
                continue
            different = {title: count for title, count in differing.items() if count}
            rows.append({"name": name, "kernels": kernel, "differing": different})
            if different:
                where = ", ".join(f"{count} of {title}" for title, count in different.items())
                bits = "elements with other bits than the CPU's reference"
                wrong.append(f"{name}, {kernel}: {bits}: {where}")
    return {"rows": rows, "dtype": dtype_name(dtype), FAILURES: wrong}


def bandwidth(
    names: Sequence[str], shape: tuple[int, int], dtype: torch.dtype, context: Context
) -> Row:
    """Time quantizers relative to a copy, and return the rate of reading and writing x once."""
    import quantizers

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(context.device, dtype)
    return over_copy(x, quantizers.own_cases(x, names, quantizers.available(x.device)), context)


def around_gemms(shape: tuple[int, int], context: Context) -> Row:
    """Time a layer's operations on x before and after its GEMMs, except quantization."""
    import quantizers

    from metis_hf.noise import Key
    from metis_hf.numerics.kernels import use_kernels
    from metis_hf.numerics.kernels.epilogue import finish_product
    from metis_hf.transforms.products import project
    from metis_hf.transforms.spectral import sum_rows

    device, generator = context.device, torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    scale, bias = torch.ones((), device=device), torch.zeros(shape[1], device=device)
    directions = torch.randn(shape[1], DIRECTIONS, generator=generator).to(device)
    key = Key(3, torch.ones((), dtype=torch.int32, device=device))
    calls: dict[str, Callable[[], object]] = {
        "outer scale": lambda: finish_product(x, [scale]),
        "bias": lambda: finish_product(x, [], bias),
        "outer scale and bias": lambda: finish_product(x, [scale], bias),
        "sums of rows": lambda: sum_rows(x, max(2, shape[0] // 64), key),
        f"projection on {DIRECTIONS} directions": lambda: project(x, directions),
    }

    def run(call: Callable[[], object], kernels: str) -> None:
        with use_kernels(kernels):
            call()

    chosen = [name for name in quantizers.available(device) if name != "compiled"]
    read_once = {"bytes": x.nbytes}  # these operations write little
    cases = [
        (
            {"name": name, "kernels": kernels, "dtype": "bfloat16"}
            | (read_once if name.startswith(("sums", "projection")) else {}),
            partial(run, call, kernels),
        )
        for name, call in calls.items()
        for kernels in chosen
    ]
    return over_copy(x, cases, context)


def over_copy(x: Tensor, cases: Sequence[Case], context: Context) -> Row:
    """Time calls that read x, relative to a copy of x."""
    device, target = context.device, torch.empty_like(x)
    row = {"name": "copy", "kernels": "torch", "dtype": dtype_name(x.dtype)}
    everything = [(row, lambda: target.copy_(x)), *cases]
    kept, calls, lengths = [], [], []
    without: list[Row] = []
    wrong: list[str] = []
    with torch.no_grad():
        for row, call in everything:
            try:
                first, length = _first_calls(call, device)
            except torch.OutOfMemoryError:
                without.append({**row, "reason": "memory is too small"})
                free_memory()
                continue
            except Exception as error:  # continue with the other calls
                wrong.append(f"{row['name']}, {row['kernels']}: {text_of(error)}")
                continue
            kept.append({**row, "shape": list(x.shape), "first_call_s": first})
            calls.append(partial(_repeat, call, length))
            lengths.append(length)
        times = interleave(calls, context.rounds, budget=context.budget, device=device, cold=True)
    each = [[seconds / n for seconds in found] for found, n in zip(times, lengths)]
    for row, found in zip(kept, each):
        row |= summary(found, each[0])
        row["gb_per_s"] = row.get("bytes", 2 * x.nbytes) / (row["ms"] / 1e3) / 1e9
    return {"rows": kept, "without": without, FAILURES: wrong}


def _first_calls(call: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Return (seconds of the first call, number of calls in a burst)."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return times[0], max(1, min(100, int(_BURST / times[1]))) if device.type == "cuda" else 1


def _repeat(call: Callable[[], object], length: int) -> None:
    for _ in range(length):
        call()


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)
