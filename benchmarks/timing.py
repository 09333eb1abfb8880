"""Shared code of the benchmarks: interleaved timing, medians and their spread, JSON, tables.

The compared calls run in turn, round by round in one process, so that a change in the machine's
speed affects all of them. Times are thread CPU time with one CPU thread, which other processes
disturb least, wall-clock time with several threads, and CUDA events on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from metis_hf.shared.devices import device_of
from metis_hf.shared.records import bf16_units

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]
KERNEL_COLOURS = {"compiled": "#0072B2", "triton": "#009E73", "reference": "#E69F00"}

# Containers often set this variable; with it, the benchmarks' subprocesses would compile torch's
# Python sources every time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

FEW = 4  # with fewer rounds, the range is shown instead of quartiles
SPREAD = f"(quartiles; range of < {FEW} rounds)"
STAT = Path("/proc/stat")
_EVICTING = 1 << 25  # fp32 numbers: 128 MiB, several times the caches of most CPUs
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's mallopt


def program_arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that times whole programs, which run on the CPU."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to check that everything runs"
    )
    parser.add_argument("--out", type=Path, help="folder for the results; default: results/")
    parser.set_defaults(device=torch.device("cpu"))
    return parser


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that times calls in its own process."""
    parser = program_arguments(doc)
    parser.add_argument("--device", type=device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads; default: 1")
    return parser


def device(name: str) -> torch.device:
    """Parse a device that torch can use here; an argparse type."""
    try:
        return device_of(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse arguments and set `out`, so that quick and GPU runs do not replace CPU records."""
    args = parser.parse_args()
    if args.out is None:
        quick = Path(tempfile.gettempdir()) / "metis-benchmarks"
        kept = RESULTS if args.device.type == "cpu" else RESULTS / args.device.type
        args.out = quick if args.quick else kept
    return args


def prepare(threads: int) -> None:
    """Fix the number of threads, and make glibc keep freed memory.

    Otherwise page faults on fresh memory would dominate the measurement.
    """
    torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in records, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def synchronize(device: torch.device | None) -> None:
    """Wait for a GPU's work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device | None = None) -> float:
    """Return the seconds of one call."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)  # finish earlier work first
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    call()
    return clock() - started


def interleave(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    *,
    budget: float,
    device: torch.device | None = None,
    warm_up: bool = True,
    cold: bool = False,
) -> list[list[float]]:
    """Return the seconds of each call in each round.

    Args:
        calls: the calls to compare.
        rounds: at most this many, at least two.
        budget: seconds after the warm-up, after which no further round begins.
        device: where the calls compute.
        warm_up: run each call once before, untimed.
        cold: flush the CPU caches before each call. Otherwise some calls profit from data that the
            previous call left there, which matters for single passes over memory.
    """
    if warm_up:
        for call in calls:
            call()
    synchronize(device)
    started = time.perf_counter()  # the budget excludes compilation in the first calls
    on_cpu = device is None or device.type == "cpu"
    other = torch.zeros(_EVICTING) if cold and on_cpu else None
    times: list[list[float]] = [[] for _ in calls]
    for done in range(rounds):
        if done >= 2 and time.perf_counter() - started > budget:
            break
        for call, found in zip(calls, times):
            if other is not None:
                other.add_(1)
            found.append(seconds(call, device))
    return times


def printed_seconds(
    program: str, *given: str, environment: Mapping[str, str] | None = None
) -> float:
    """Run Python code with arguments in its own process; return the number it prints last.

    `environment` is the process's; None inherits this process's environment.

    Raises:
        RuntimeError: the program failed; the message includes its stderr.
    """
    command = [sys.executable, "-c", program, *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"the timed program exited with status {done.returncode}; fix the error below and "
            f"run this again:\n{done.stderr}"
        )
    return float(done.stdout.splitlines()[-1])


class NotRecorded(RuntimeError):
    """Raised if a call cannot be recorded as a CUDA graph, also for lack of memory."""


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """Record a call as a CUDA graph, and return the graph's replay function.

    Raises:
        NotRecorded: the call runs but cannot be recorded.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        raise NotRecorded(f"{type(error).__name__}: {error}") from error
    return graph.replay


def summary(times: Sequence[float], base: Sequence[float] | None = None) -> Row:
    """Return median and quartiles in ms, and of the ratios to `base` in the same rounds."""
    low, middle, high = quartiles(times)
    row = {"ms": middle * 1e3, "quartiles_ms": [low * 1e3, high * 1e3], "rounds": len(times)}
    if base is not None:
        low, middle, high = quartiles([a / b for a, b in zip(times, base)])
        row |= {"ratio": middle, "quartiles_ratio": [low, high]}
    return row


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; a single value is all three."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def machine(device: torch.device | None = None) -> Row:
    """Return the versions, the processor and the threads of this machine."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    row = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "capability": capabilities,
        "bf16_units": bf16_units(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device is not None and device.type == "cuda":
        row["gpu"] = torch.cuda.get_device_name(device)
    return row


def before_start(device: torch.device | None = None) -> Row:
    """Return `machine` and, as `busy`, the load by other processes (`busy_share`)."""
    return {**machine(device), "busy": busy_share()}


def busy_share(seconds: float = 1.0) -> float | None:
    """Measure the share of all cores' time that other processes use; None if not known.

    A load average would still include a benchmark that ended a moment ago.
    """
    if not STAT.exists():
        return None
    before = _core_times()
    time.sleep(seconds)
    total, idle = (after - then for after, then in zip(_core_times(), before))
    return round(1 - idle / total, 2) if total else None


def _core_times() -> tuple[int, int]:
    """Return (total, idle) time of the cores since boot, in ticks."""
    ticks = [int(part) for part in STAT.read_text().split("\n")[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]  # idle includes waiting for a disk


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def write(out: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write OUT/NAME.json."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a markdown table; columns after the first are right-aligned."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return a page with each known `<!-- table: name -->` ... `<!-- end -->` filled."""

    def fill(match: re.Match[str]) -> str:
        return match[1] + tables.get(match[2], match[3]) + match[4]

    return re.sub(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", fill, page, flags=re.DOTALL)


def spread(row: Row, key: str = "ratio") -> str:
    """Format median and quartiles, or the range for fewer than FEW rounds: "1.23 (1.20-1.30)"."""
    low, high = row[f"quartiles_{key}"]
    if row["rounds"] < FEW:  # the quartiles lie halfway between the median and the ends
        low, high = 2 * low - row[key], 2 * high - row[key]
    return f"{short(row[key])} ({short(low)}-{short(high)})"


def short(value: float) -> str:
    """Format with about three significant digits, never in exponential form."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def figure(rows: int, columns: int, size: tuple[float, float]):
    """Return (figure, axes [rows columns]) in the style of the package's plots."""
    from metis_hf.lab.show.figure import figure_axes, tidy

    found, axes = figure_axes(rows, columns, size)
    tidy(*axes.flat)
    for axis in axes.flat:
        axis.set_axisbelow(True)
    return found, axes
