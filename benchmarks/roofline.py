"""Measure memory traffic and bandwidth, and predict layer steps at larger sizes.

    python benchmarks/roofline.py                  # a minute on one core
    python benchmarks/roofline.py --device cuda    # the same on a GPU

1. Bytes moved to make one operand, counted at the dispatcher (`traffic`), over the bytes of a copy.
2. Bytes moved by a quantizer over its measured time: its bandwidth, over a copy's bandwidth.
3. A predicted layer step for sizes that do not fit here: the FLOPs of its GEMMs at the rate of the
   unquantized layer, plus all other bytes at the scheme's measured rate at a size that fits. The
   prediction is checked at another size that fits. With a GPU's data sheet in place of measured
   rates it is a lower bound.

Writes results/roofline.json and .png.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import traffic
from layer import SCHEMES, linear, realistic, step_of
from quantizers import available, ours
from timing import (
    KERNEL_COLOURS,
    Row,
    arguments,
    before_start,
    figure,
    interleave,
    parse,
    prepare,
    short,
    spread,
    summary,
    table,
    write,
)

from metis_hf import MetisConfig
from metis_hf.layers.make import convert_linear
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.operands import Operand
from metis_hf.operands.conditioners.spectral import Spectral
from metis_hf.schemes import layer_rank

OPERANDS = {
    "direct, one level": Operand(Quantizer(two_level=False)),
    "direct": Operand(Quantizer()),
    "direct, stochastic": Operand(Quantizer(rounding="stochastic")),  # type: ignore[arg-type]
    "split": Operand(Quantizer(), Spectral(16)),
}
QUANTIZERS = ("nvfp4, one level", "nvfp4", "nvfp4, stochastic")
ROUNDS, BUDGET = 9, 40.0
# Bytes and FLOPs are counted at dimensions that are smaller by this factor, then scaled up.
REDUCTION = 8
CONTROL = "bf16"
# From the data sheet: dense bf16 without sparsity, HBM.
HERE, GPU = "this machine", "H100 SXM, data sheet"
GPU_FLOPS, GPU_BANDWIDTH = 989e12, 3.35e12


class Sizes(NamedTuple):
    """Layers as (tokens, in_features, out_features)."""

    fitted: tuple[int, int, int]  # measured; gives the rates
    checked: tuple[int, int, int]  # measured and predicted
    predicted: tuple[tuple[int, int, int], ...]


SIZES = Sizes(
    (8192, 1024, 1024),
    (4096, 2048, 2048),
    ((16384, 4096, 4096), (16384, 4096, 11008), (16384, 8192, 8192)),
)
QUICK_SIZES = Sizes((512, 128, 128), (256, 256, 256), ())


def operand_traffic(kernels: list[str], rows: int, device: torch.device) -> list[Row]:
    x = realistic(rows, 1024, 0, device)
    found = []
    for kernel in kernels:
        for name, operand in OPERANDS.items():
            call = partial(operand, x, dim=-1, key=Key(3), dtype=torch.float32)
            over_copy = traffic.multiple(call, x, kernel)
            found.append({"operand": name, "kernels": kernel, "over_copy": over_copy})
    return found


def bandwidths(kernels: list[str], rows: int, rounds: int, device: torch.device) -> list[Row]:
    """Return the GB/s of quantizers, from their counted bytes, and of a copy."""
    x = realistic(rows, 1024, 0, device)
    target = torch.empty_like(x)
    cases: list[tuple[Row, Callable[[], object]]] = [
        ({"name": "copy", "kernels": "torch", "bytes": 2 * x.nbytes}, lambda: target.copy_(x))
    ]
    for kernel in kernels:
        for name in QUANTIZERS:
            call = ours(x, name, kernel)
            moved = traffic.multiple(call, x, kernel) * 2 * x.nbytes
            cases.append(({"name": name, "kernels": kernel, "bytes": moved}, call))
    calls = [call for _, call in cases]
    times = interleave(calls, rounds, budget=BUDGET, device=device, cold=True)
    found = []
    for (row, _), seconds in zip(cases, times):
        rate = row["bytes"] / statistics.median(seconds)
        found.append({**row, **summary(seconds, times[0]), "gb_per_s": rate / 1e9})
    for row in found:
        row["share_of_copy"] = row["gb_per_s"] / found[0]["gb_per_s"]
    return found


def make_step(
    scheme: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    kernels: str | None = None,
) -> Callable[[], None]:
    tokens, inputs, outputs = shape
    config = MetisConfig(scheme=scheme, rank=rank)
    module = convert_linear(linear(inputs, outputs).to(device), config, name="layer")
    module = module.to(dtype).train()
    x = realistic(tokens, inputs, 0, device).to(dtype)
    return step_of(module, x, torch.ones(tokens, outputs, dtype=dtype, device=device), kernels)


def rank_of(shape: tuple[int, int, int]) -> int:
    return layer_rank(MetisConfig(), shape[1], shape[2])


def count(
    scheme: str, shape: tuple[int, int, int], dtype: torch.dtype, kernels: str
) -> tuple[float, float]:
    """Return (GEMM FLOPs, all other bytes) of a layer's step, counted at a smaller size."""
    n = min(REDUCTION, *(size // 64 for size in shape))
    small = (shape[0] // n, shape[1] // n, shape[2] // n)
    rank = max(1, rank_of(shape) // n)
    step = make_step(scheme, small, dtype, torch.device("cpu"), rank, kernels)
    step()
    with traffic.counting(gemm_from=min(small)) as found:
        step()
    return found.gemm_flops * n**3, found.bytes * n**2


def predictions(
    sizes: Sizes, kernels: str, rounds: int, device: torch.device
) -> tuple[list[Row], list[Row]]:
    """Return (rates of this machine by scheme, predicted steps)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measured = {
        shape: step_times(shape, dtype, rounds, device) for shape in (sizes.fitted, sizes.checked)
    }
    fitted = {scheme: row["ms"] / 1e3 for scheme, row in measured[sizes.fitted].items()}
    rates, found = [], []
    gemm_rate = count(CONTROL, sizes.fitted, dtype, kernels)[0] / fitted[CONTROL]
    for scheme in SCHEMES:
        moved = count(scheme, sizes.fitted, dtype, kernels)[1]
        rest = fitted[scheme] - fitted[CONTROL]
        bandwidth = moved / rest if scheme != CONTROL and rest > 0 else math.inf
        rates.append(
            {
                "scheme": scheme,
                "flops": gemm_rate,
                "gb_per_s": bandwidth / 1e9 if math.isfinite(bandwidth) else None,
                "rounds": measured[sizes.fitted][scheme]["rounds"],
            }
        )
        for shape in (sizes.checked, *sizes.predicted):
            flops, moved = count(scheme, shape, dtype, kernels)
            row = _prediction(scheme, shape, HERE, flops / gemm_rate, moved / bandwidth)
            if shape == sizes.checked:
                step = measured[shape][scheme]
                row |= {"measured_ms": step["ms"], "rounds": step["rounds"]}
            found.append(row)
            flops, moved = count(scheme, shape, torch.bfloat16, kernels)
            found.append(_prediction(scheme, shape, GPU, flops / GPU_FLOPS, moved / GPU_BANDWIDTH))
    for row in found:
        same = [r for r in found if (r["shape"], r["machine"]) == (row["shape"], row["machine"])]
        row["ratio"] = row["ms"] / same[0]["ms"]  # SCHEMES begins with the control
    return rates, found


def step_times(
    shape: tuple[int, int, int], dtype: torch.dtype, rounds: int, device: torch.device
) -> dict[str, Row]:
    """Return the times of a layer's step, by scheme."""
    steps = [make_step(scheme, shape, dtype, device, rank_of(shape)) for scheme in SCHEMES]
    times = interleave(steps, rounds, budget=BUDGET, device=device)
    return {scheme: summary(seconds) for scheme, seconds in zip(SCHEMES, times)}


def _prediction(
    scheme: str, shape: tuple[int, int, int], machine: str, gemms: float, rest: float
) -> Row:
    return {
        "scheme": scheme,
        "shape": list(shape),
        "machine": machine,
        "gemms_ms": gemms * 1e3,
        "rest_ms": rest * 1e3,
        "ms": (gemms + rest) * 1e3,
    }


def traffic_markdown(rows: list[Row]) -> str:
    kernels = list(dict.fromkeys(row["kernels"] for row in rows))
    cells = []
    for name in OPERANDS:
        of_name = {row["kernels"]: row["over_copy"] for row in rows if row["operand"] == name}
        cells.append([name, *(short(of_name[kernel]) for kernel in kernels)])
    return table(["operand, fp32", *kernels], cells)


def bandwidth_markdown(rows: list[Row]) -> str:
    cells = [
        [
            row["name"],
            row["kernels"],
            spread(row, "ms"),
            f"{row['gb_per_s']:.3g}",
            f"{100 * row['share_of_copy']:.0f} %",
        ]
        for row in rows
    ]
    return table(["", "kernels", "ms (quartiles)", "GB/s", "of a copy's"], cells)


def prediction_markdown(rows: list[Row]) -> str:
    cells = [
        [
            row["machine"],
            " x ".join(str(n) for n in row["shape"]),
            row["scheme"],
            short(row["gemms_ms"]),
            short(row["rest_ms"]),
            short(row["ms"]),
            short(row["measured_ms"]) if "measured_ms" in row else "",
            short(row["ratio"]),
        ]
        for row in rows
    ]
    columns = ["machine", "shape", "scheme", "GEMMs, ms", "rest, ms", "step, ms", "measured, ms"]
    return table([*columns, "over bf16"], cells)


def draw(rows: list[Row], path: Path) -> None:
    found, axes = figure(1, 1, (7.5, 3.6))
    axis = axes[0, 0]
    names = list(OPERANDS)
    kernels = list(dict.fromkeys(row["kernels"] for row in rows))
    height = 0.8 / len(kernels)
    for index, kernel in enumerate(kernels):
        values = [row["over_copy"] for row in rows if row["kernels"] == kernel]
        places = [place + index * height for place in range(len(names))]
        bars = axis.barh(places, values, height, color=KERNEL_COLOURS[kernel], label=kernel)
        axis.bar_label(bars, [short(value) for value in values], padding=3)
    axis.set_yticks([place + height * (len(kernels) - 1) / 2 for place in range(len(names))], names)
    axis.set(xlabel="bytes moved, over reading and writing the tensor once")
    axis.margins(x=0.1)
    axis.invert_yaxis()
    axis.legend(frameon=False, loc="lower right")
    found.savefig(path)


def main() -> None:
    args = parse(arguments(__doc__))
    prepare(args.threads)
    if args.device.type != "cuda":
        print(
            "no GPU was requested (--device cuda), so GPU bandwidths are not measured",
            file=sys.stderr,
        )
    before = before_start(args.device)
    # Bytes can be counted for compiled kernels and torch operations, not for Triton kernels.
    kernels = [name for name in available(args.device)[::-1] if name != "triton"]
    rounds = 2 if args.quick else ROUNDS
    rows = 256 if args.quick else 4096
    moved = operand_traffic(kernels, rows, args.device)
    reached = bandwidths(kernels, rows, rounds, args.device)
    sizes = QUICK_SIZES if args.quick else SIZES
    on_cpu = available(torch.device("cpu"))[-1]  # where steps are counted
    rates, predicted = predictions(sizes, on_cpu, min(rounds, 4), args.device)
    print(traffic_markdown(moved))
    print(bandwidth_markdown(reached))
    print(prediction_markdown(predicted))
    record = {
        "machine": before,
        "traffic": moved,
        "bandwidth": reached,
        "rates": rates,
        "predictions": predicted,
    }
    write(args.out, "roofline", record)
    draw(moved, args.out / "roofline.png")


if __name__ == "__main__":
    main()
