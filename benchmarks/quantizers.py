"""Time fake quantization against a copy of the same tensor: our kernels and other libraries.

    python benchmarks/quantizers.py            # two minutes on one core
    python benchmarks/quantizers.py --quick    # seconds

Ratios are to a copy of the fp32 tensor of that shape in the same round. Each call starts with cold
CPU caches, as many calls in a training step do. Writes results/quantizers.json and .png.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import peers
import torch
from timing import (
    KERNEL_COLOURS,
    Row,
    arguments,
    before_start,
    dtype_name,
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
from torch import Tensor

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import KERNELS, pack, unpack, use_kernels
from metis_hf.numerics.kernels.choice import missing
from metis_hf.numerics.kernels.request import ENVIRONMENT

COPY = "copy"
QUANTIZERS = {
    "nvfp4": {},
    "nvfp4, one level": {"two_level": False},
    "nvfp4, stochastic": {"rounding": "stochastic"},
    "nvfp4, one level, stochastic": {"two_level": False, "rounding": "stochastic"},
    "nvfp4, square": {"tile": "square"},
    "nvfp4, columns": {},
    "nvfp4, four over six": {"scale_rule": "four-over-six"},
    "nvfp4, search": {"scale_rule": "search"},
    "nvfp4, MS-EDEN": {"scale_rule": "eden"},
    "mxfp4": {"fmt": "mxfp4"},
}
REFERENCE_ONLY = ("mxfp4",)
# Packing (what is saved for the backward pass) and unpacking with the first quantizer.
HALVES = PACK, UNPACK = ("nvfp4, pack", "nvfp4, unpack")
SHAPES = [(4096, 1024), (1024, 4096), (1024, 128)]
QUICK_SHAPES = [(512, 512)]
DTYPES = [torch.float32, torch.bfloat16]
ROUNDS, QUICK_ROUNDS = 11, 3
BUDGET = 120.0  # seconds for all shapes
Case = tuple[Row, Callable[[], object]]


def ours(x: Tensor, name: str, kernels: str) -> Callable[[], Tensor]:
    quantizer = Quantizer(**QUANTIZERS[name])  # type: ignore[arg-type]
    dim = 0 if name.endswith("columns") else -1

    def call() -> Tensor:
        with use_kernels(kernels):
            return quantizer(x, dim=dim, key=5, dtype=x.dtype)

    return call


def half(x: Tensor, name: str, kernels: str) -> Callable[[], object]:
    quantizer, (rows, columns) = Quantizer(), x.shape
    with use_kernels("reference"):  # not `kernels`: their first call is timed
        packed = pack(x, quantizer)

    def call() -> object:
        with use_kernels(kernels):
            if name == PACK:
                return pack(x, quantizer)
            return unpack(packed, quantizer, shape=(rows, columns), dtype=x.dtype)

    return call


def available(device: torch.device) -> list[str]:
    """Return the kernels that run here; METIS_KERNELS=reference leaves only the reference."""
    if os.environ.get(ENVIRONMENT) == "reference":
        return ["reference"]
    found = ["reference"]
    for name in KERNELS[1:]:
        lacks = missing(name, device)
        if lacks is None:
            found.append(name)
        elif name == ("triton" if device.type == "cuda" else "compiled"):
            print(f"measuring only the reference kernels: there is no {lacks}", file=sys.stderr)
    return found


def covered(name: str, kernels: str) -> bool:
    """Return whether these kernels implement a quantizer."""
    return kernels == "reference" or name not in REFERENCE_ONLY


def own_cases(x: Tensor, names: Sequence[str], kernels: Sequence[str]) -> list[Case]:
    """Return calls that quantize, pack or unpack x with each of our kernels."""
    return [
        (
            {"name": name, "kernels": kernel, "dtype": dtype_name(x.dtype)},
            (half if name in HALVES else ours)(x, name, kernel),
        )
        for name in names
        for kernel in kernels
        if covered(name, kernel)
    ]


def cases(
    shape: tuple[int, int], quick: bool, device: torch.device, paper: Path | None
) -> list[Case]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.empty_like(x)
    found: list[Case] = [({"name": COPY, "dtype": "float32"}, lambda: target.copy_(x))]
    kernels = available(device)
    for dtype in DTYPES[: 1 if quick else None]:
        typed = x.to(dtype)
        found += own_cases(typed, [*list(QUANTIZERS)[: 3 if quick else None], *HALVES], kernels)
        others = {
            peer: (lambda make=make, typed=typed: make(typed))
            for peer, make in peers.QUANTIZERS.items()
            if device.type == "cpu" or peer != "ml_dtypes"
        }
        if paper is not None:
            others["paper's code"] = lambda typed=typed: peers.paper_quantizer(paper, typed)
        for peer, make in others.items():
            call = peers.usable(make, peer)
            if call is not None:
                name = "fp4, fp32 scales, stochastic" if peer == "paper's code" else "nvfp4"
                found.append(({"name": name, "kernels": peer, "dtype": dtype_name(dtype)}, call))
    return found


def measure(
    shape: tuple[int, int], found: list[Case], rounds: int, budget: float, device: torch.device
) -> list[Row]:
    first = []
    for _, call in found:
        started = time.perf_counter()
        call()
        first.append(time.perf_counter() - started)
    calls = [call for _, call in found]
    times = interleave(calls, rounds, budget=budget, device=device, cold=True)
    return [
        {**case, "shape": list(shape), **summary(seconds, times[0]), "first_call_s": opening}
        for (case, _), seconds, opening in zip(found, times, first)
    ]


def markdown(rows: list[Row]) -> str:
    cells = [
        [
            f"{row['shape'][0]} x {row['shape'][1]}",
            row["dtype"],
            row["name"],
            row.get("kernels", "torch"),
            spread(row, "ms"),
            spread(row),
        ]
        for row in rows
    ]
    return table(["shape", "dtype", "quantizer", "kernels", "ms (quartiles)", "over copy"], cells)


def draw(rows: list[Row], path: Path) -> None:
    """Draw the ratios of the first shape in fp32, a bar per quantizer and implementation."""
    shape = rows[0]["shape"]
    rows = [row for row in rows if row["shape"] == shape and row["dtype"] == "float32"]
    rows.sort(key=lambda row: row["ratio"])
    found, axes = figure(1, 1, (8, 0.28 * len(rows) + 1.2))
    axis = axes[0, 0]
    labels = [f"{row['name']}  ({row.get('kernels', 'torch')})" for row in rows]
    ratios = [row["ratio"] for row in rows]
    colors = [KERNEL_COLOURS.get(row.get("kernels", ""), "#999999") for row in rows]
    bars = axis.barh(labels, ratios, color=["black", *colors[1:]])
    axis.bar_label(bars, [short(ratio) for ratio in ratios], padding=3)
    axis.set(xscale="log", xlabel=f"time over a copy of the tensor, fp32 {shape[0]} x {shape[1]}")
    axis.margins(x=0.12, y=0.01)
    axis.invert_yaxis()
    found.savefig(path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--paper", type=Path, help="folder of a checkout of the paper's released code"
    )
    args = parse(parser)
    prepare(args.threads)
    shapes = QUICK_SHAPES if args.quick else SHAPES
    before = before_start(args.device)
    rows: list[Row] = []
    with torch.no_grad():
        for shape in shapes:
            found = cases(shape, args.quick, args.device, args.paper)
            rounds = QUICK_ROUNDS if args.quick else ROUNDS
            rows += measure(shape, found, rounds, BUDGET / len(shapes), args.device)
    print(markdown(rows))
    write(args.out, "quantizers", {"machine": before, "rows": rows})
    draw(rows, args.out / "quantizers.png")


if __name__ == "__main__":
    main()
