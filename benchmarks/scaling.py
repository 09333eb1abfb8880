"""Measure a metis layer's cost by part against tokens, width and rank, and compare with theory.

    python benchmarks/scaling.py            # three minutes on one core
    python benchmarks/scaling.py --quick    # seconds

Slopes are fitted to log time against log size over the upper half of a sweep: 1 is proportional, 0
flat. Theory is the same fit to the FLOPs of `metis_hf.lab.cost`, which follow
O(lmk + mnk + lnk) for a layer of m inputs and n outputs, l tokens and k directions. Writes
results/scaling.json and .png.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import parts
import torch
from layer import linear, realistic, step_of
from timing import Row, arguments, before_start, figure, parse, prepare, short, table, write

from metis_hf import MetisConfig
from metis_hf.lab.cost import overhead
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.make import convert_linear

ROUNDS, BUDGET = 3, 150.0
WIDTH, SHARE = 1024, 0.015
SWEEPS: dict[str, list[float]] = {
    "tokens": [512, 2048, 8192, 16384, 32768, 65536],
    "width": [256, 512, 1024, 2048, 4096, 8192],
    "rank": [0.005, 0.015, 0.03, 0.06, 0.125],
}
QUICK_SWEEPS: dict[str, list[float]] = {
    "tokens": [64, 128, 256],
    "width": [32, 64, 96],
    "rank": [0.1, 0.2, 0.4],
}
TOKENS = {"width": 2048, "rank": 8192}
QUICK_TOKENS = {"width": 64, "rank": 128}
QUICK_WIDTH = 64
# part -> its kinds of work in `cost.overhead`
THEORY = {
    parts.GEMMS: ("gemm",),
    parts.QUANTIZE: ("quantizers",),
    parts.SUBSPACE: ("subspace", "factorization"),
    parts.PROJECT: ("projection",),
    parts.LOW_RANK: ("low_rank",),
    parts.CORRECT: ("corrections", "thin_products"),
    parts.WEIGHT: ("weight_factors",),
}


class Point(NamedTuple):
    sweep: str
    value: float
    tokens: int
    layer: MetisLayer
    step: Callable[[], None]


def points(quick: bool, device: torch.device) -> list[Point]:
    found = []
    width = QUICK_WIDTH if quick else WIDTH
    tokens = QUICK_TOKENS if quick else TOKENS
    for sweep, values in (QUICK_SWEEPS if quick else SWEEPS).items():
        for value in values:
            m = int(value) if sweep == "width" else width
            rows = int(value) if sweep == "tokens" else tokens[sweep]
            share = value if sweep == "rank" else SHARE
            # Set the rank explicitly: a rank that is rounded up would distort the slopes.
            config = MetisConfig(rank=max(1, round(share * m)))
            module = linear(m, m).to(device)
            layer = convert_linear(module, config, name=f"{sweep} {value}").train()
            x, dy = realistic(rows, m, 0, device), realistic(rows, m, 1, device)
            found.append(Point(sweep, value, rows, layer, step_of(layer, x, dy, None)))
    return found


def measure(found: list[Point], rounds: int, budget: float, device: torch.device) -> list[Row]:
    started = time.perf_counter()
    for point in found:
        point.step()
    times: list[list[dict[str, float]]] = [[] for _ in found]
    for done in range(rounds):
        if done >= 2 and time.perf_counter() - started > budget:
            break
        for point, seconds in zip(found, times):
            seconds.append(parts.by_part(point.step, device))
    return [row_of(point, seconds) for point, seconds in zip(found, times)]


def row_of(point: Point, seconds: list[dict[str, float]]) -> Row:
    cost = flops_of(point.layer, point.tokens)
    return {
        "sweep": point.sweep,
        "value": point.value,
        "tokens": point.tokens,
        "width": point.layer.in_features,
        "rank": point.layer.config.rank,
        "parts_ms": parts.medians_ms(seconds),
        "parts_spread_ms": {
            name: [1e3 * end(one[name] for one in seconds) for end in (min, max)]
            for name in parts.NAMES
        },
        "flops": {
            part: sum(cost.get(name, 0.0) for name in names) for part, names in THEORY.items()
        },
    }


def flops_of(layer: MetisLayer, tokens: int) -> dict[str, float]:
    """Count a layer's step by kind: GEMM FLOPs, elements to quantize, the scheme's FLOPs."""
    i, o = layer.in_features, layer.out_features
    gemm = 6.0 * tokens * i * o
    parts = overhead([((i, o), layer.config)], tokens).parts
    elements = float(tokens * i + tokens * o + i * o)
    return {kind: share * gemm for kind, share in parts.items()} | {
        "gemm": gemm,
        "quantizers": elements,
    }


def slope(sizes: list[float], values: list[float]) -> float | None:
    """Fit log value against log size by least squares; return the slope, None if a value is 0."""
    if min(values) <= 0:
        return None
    fit = statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in values])
    return fit.slope


def slopes(rows: list[Row]) -> list[Row]:
    found = []
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        sweep_rows = [row for row in rows if row["sweep"] == sweep]
        upper = sweep_rows[(len(sweep_rows) - 1) // 2 :]
        sizes = [row["value"] for row in upper]
        for part in THEORY:
            measured = slope(sizes, [row["parts_ms"][part] for row in upper])
            theory = slope(sizes, [row["flops"][part] for row in upper])
            found.append({"sweep": sweep, "part": part, "slope": measured, "theory": theory})
    return found


def markdown(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        split = row["parts_ms"]
        cells.append(
            [
                row["sweep"],
                row["tokens"],
                row["width"],
                row["rank"],
                *(short(split[name]) for name in THEORY),
                f"{100 * split[parts.SUBSPACE] / split[parts.GEMMS]:.1f} %",
            ]
        )
    columns = ["sweep", "tokens", "width", "rank", *(f"{name}, ms" for name in THEORY)]
    return table([*columns, "subspace / GEMMs"], cells)


def slopes_markdown(found: list[Row]) -> str:
    sweeps = list(dict.fromkeys(row["sweep"] for row in found))
    cells = []
    for part in THEORY:
        line = [part]
        for sweep in sweeps:
            row = next(row for row in found if row["sweep"] == sweep and row["part"] == part)
            both = (row["slope"], row["theory"])
            line.append(" / ".join("-" if x is None else f"{x:.2f}" for x in both))
        cells.append(line)
    return table(["part", *(f"{sweep}: measured / theory" for sweep in sweeps)], cells)


def draw(rows: list[Row], path: Path) -> None:
    colours = ("#000000", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#009E73")
    sweeps = list(dict.fromkeys(row["sweep"] for row in rows))
    found, axes = figure(1, len(sweeps), (4.2 * len(sweeps), 4.2))
    labels = {"tokens": "tokens", "width": "inputs = outputs", "rank": "rank"}
    for axis, sweep in zip(axes[0], sweeps):
        shown = [row for row in rows if row["sweep"] == sweep]
        sizes = [row[sweep] for row in shown]
        for part, colour in zip(THEORY, colours, strict=True):
            times = [row["parts_ms"][part] for row in shown]
            axis.plot(sizes, times, "o-", color=colour, ms=3, lw=1.3, label=part)
        axis.set(xscale="log", yscale="log", xlabel=labels[sweep])
        axis.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
        axis.set_xticks([], minor=True)
    axes[0, 0].set_ylabel("ms, forward and backward")
    handles, names = axes[0, 0].get_legend_handles_labels()
    found.legend(handles, names, loc="outside lower center", ncols=len(THEORY), frameon=False)
    found.savefig(path)


def main() -> None:
    args = parse(arguments(__doc__))
    prepare(args.threads)
    before = before_start(args.device)
    rounds = 2 if args.quick else ROUNDS
    rows = measure(points(args.quick, args.device), rounds, BUDGET, args.device)
    found = slopes(rows)
    print(markdown(rows))
    print(slopes_markdown(found))
    write(args.out, "scaling", {"machine": before, "rows": rows, "slopes": found})
    draw(rows, args.out / "scaling.png")


if __name__ == "__main__":
    main()
