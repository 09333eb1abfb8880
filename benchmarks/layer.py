"""Time one linear layer, forward and backward, per scheme against nn.Linear, and by part.

    python benchmarks/layer.py            # three minutes on one core
    python benchmarks/layer.py --quick    # seconds

A step computes y from x [t i], then dx and dw from a given dy, without an optimizer. Ratios are to
nn.Linear in the same round, in fp32 on the CPU and in bf16 on a GPU. Parts are timed in separate
steps, because timing them adds overhead. Writes results/layer.json and .png.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import parts
import peers
import torch
from memory import megabytes, peak_memory
from quantizers import available
from timing import (
    SPREAD,
    NotRecorded,
    Row,
    arguments,
    before_start,
    dtype_name,
    figure,
    interleave,
    parse,
    prepare,
    recorded,
    short,
    spread,
    summary,
    table,
    write,
)
from torch import Tensor, nn

from metis_hf import MetisConfig
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.make import convert_linear
from metis_hf.numerics.kernels import use_kernels
from metis_hf.training.layer_states import after_step

SCHEMES = ("bf16", "nvfp4", "nvidia", "metis-paper", "metis")
KEPT = "metis, kept subspaces"  # as in seven of eight steps with `subspace_interval=8`
GPU_SCHEMES = ("nvfp4-rne", "quartet2", "four-over-six", "w4a4", KEPT)  # also timed with Triton
SHAPES = [(8192, 1024, 1024), (2048, 256, 256), (1024, 64, 64)]  # tokens, in_features, out_features
GPU_SHAPES = [(16384, 4096, 4096)]
QUICK_SHAPES = [(256, 64, 64)]
ROUNDS, PART_ROUNDS, BUDGET = 7, 3, 200.0
NN_LINEAR, PAPER = "nn.Linear", "paper's code"
WHOLE = (NN_LINEAR, PAPER, "bf16")  # not split by part: they do not use the package's GEMMs


def step_of(layer: nn.Module, x: Tensor, dy: Tensor, kernels: str | None) -> Callable[[], None]:
    """Return a forward and backward pass that drops the gradients at the end.

    Each step closure has its own copy of x, because a layer caches the input it encoded last.
    """
    x = x.clone()

    def step() -> None:
        with use_kernels(kernels):
            layer(x.detach().requires_grad_()).backward(dy)
        layer.zero_grad()

    return step


def realistic(tokens: int, width: int, seed: int, device: torch.device) -> Tensor:
    """Return a fp32 matrix [t c] with a few strong directions."""
    generator = torch.Generator().manual_seed(seed)
    strong = torch.randn(tokens, 8, generator=generator) @ torch.randn(
        8, width, generator=generator
    )
    return (torch.randn(tokens, width, generator=generator) + strong).to(device)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer without bias; its weight is the same at each call."""
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=False)


def converted(module: nn.Linear, scheme: str) -> MetisLayer:
    """Return the layer converted to a scheme or to `KEPT`, in training mode."""
    kept = scheme == KEPT
    config = MetisConfig(subspace_interval=2**30) if kept else MetisConfig(scheme=scheme)
    return convert_linear(module, config, name="layer").train()


def cases(
    shape: tuple[int, int, int],
    device: torch.device,
    paper: Path | None,
    kernels: Sequence[str] | None = None,
    other_dtype: bool = True,
) -> list[tuple[Row, Callable[[], None]]]:
    """Return (row, step) of nn.Linear, then of each scheme with each of the kernels (None: all).

    With `other_dtype`, nn.Linear and `metis` (last kernels) follow in the other dtype: bf16 on a
    CPU, fp32 on a GPU.
    """
    chosen = available(device) if kernels is None else list(kernels)
    tokens, inputs, outputs = shape
    x, dy = realistic(tokens, inputs, 0, device), realistic(tokens, outputs, 1, device) * 1e-3
    base = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: list[tuple[Row, Callable[[], None]]] = []

    def add(name: str, layer: nn.Module, dtype: torch.dtype, kernel: str | None = None) -> None:
        row = {"name": name, "dtype": dtype_name(dtype), "kernels": kernel}
        layer = layer.to(device, dtype)
        step = step_of(layer, x.to(dtype), dy.to(dtype), kernel)
        if name == KEPT:
            step()
            after_step(layer, 1, 1)
        found.append((row, step))

    add(NN_LINEAR, linear(inputs, outputs), base)
    for kernel in reversed(chosen):
        schemes = SCHEMES if kernel != "reference" else SCHEMES[1:]
        for scheme in (*schemes, *(GPU_SCHEMES if kernel == "triton" else ())):
            add(scheme, converted(linear(inputs, outputs), scheme), base, kernel)
    if other_dtype:
        other = torch.bfloat16 if base is torch.float32 else torch.float32
        add(NN_LINEAR, linear(inputs, outputs), other)
        add("metis", converted(linear(inputs, outputs), "metis"), other, chosen[-1])
    if paper is not None:
        rank = max(1, round(MetisConfig().rank_frac * min(inputs, outputs)))
        peer = peers.PaperLayer(paper, linear(inputs, outputs), rank)
        # The paper's layer takes [b s c].
        row = {"name": PAPER, "dtype": "float32", "kernels": None}
        rows = (4, tokens // 4, -1)
        found.append((row, step_of(peer, x.view(rows), dy.view(rows), None)))
    return found


def measure(
    shape: tuple[int, int, int],
    rounds: int,
    budget: float,
    device: torch.device,
    paper: Path | None,
    kernels: Sequence[str] | None = None,
    other_dtype: bool = True,
) -> list[Row]:
    """Return the times and parts of each case; `kernels` and `other_dtype` as in `cases`.

    On a GPU, rows also have a step's peak memory, and the time of its CUDA graph, which excludes
    Python overhead.
    """
    found = cases(shape, device, paper, kernels, other_dtype)
    times = interleave([step for _, step in found], rounds, budget=budget, device=device)
    rows = []
    for (case, step), seconds in zip(found, times):
        row = {**case, "shape": list(shape), **summary(seconds, times[0])}
        if device.type == "cuda":
            with peak_memory(device) as peak:
                step()
            row["peak_bytes"] = peak["bytes"]
        if case["name"] not in WHOLE:
            split = [parts.by_part(step, device) for _ in range(PART_ROUNDS)]
            row["parts_ms"] = parts.medians_ms(split)
            row["parts_rounds"] = PART_ROUNDS
        rows.append(row)
    if device.type == "cuda":
        add_recorded(rows, [step for _, step in found], rounds, budget, device)
    return rows


def measure_peers(
    shape: tuple[int, int, int], rounds: int, budget: float, device: torch.device, folder: Path
) -> Row:
    """Time nn.Linear in bf16 and other libraries' layers; give reasons for missing ones."""
    tokens, inputs, outputs = shape
    x, dy = realistic(tokens, inputs, 0, device), realistic(tokens, outputs, 1, device) * 1e-3

    make = partial(linear, inputs, outputs)
    plain = make().to(device, torch.bfloat16)
    found = [(NN_LINEAR, torch.bfloat16, step_of(plain, x.bfloat16(), dy.bfloat16(), None))]
    without = []
    # Compiling these layers takes minutes and makes none faster.
    with torch.compiler.set_stance("force_eager"):
        for name, peer, layer in peers.layers(folder, make, device):
            reason = layer if isinstance(layer, str) else None
            if reason is None:
                whole = step_of(layer, x.to(peer.dtype)[None], dy.to(peer.dtype)[None], None)
                step = partial(_under_autocast, whole) if peer.autocast else whole
                try:
                    step()
                except Exception as error:
                    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                else:
                    found.append((name, peer.dtype, step))
            if reason is not None:
                without.append({"name": name, "reason": reason})
        steps = [step for *_, step in found]
        times = interleave(steps, rounds, budget=budget, device=device)
        rows = []
        for (name, dtype, _), seconds in zip(found, times):
            row = {"name": name, "dtype": dtype_name(dtype), "kernels": None}
            rows.append({**row, "shape": list(shape), **summary(seconds, times[0])})
        if device.type == "cuda":
            add_recorded(rows, steps, rounds, budget, device)
    return {"rows": rows, "without": without}


def _under_autocast(step: Callable[[], None]) -> None:
    """Run the step under bf16 autocast, as Quartet-II trains."""
    with torch.autocast("cuda", torch.bfloat16):
        step()


def add_recorded(
    rows: list[Row],
    steps: Sequence[Callable[[], None]],
    rounds: int,
    budget: float,
    device: torch.device,
) -> None:
    """Add the times of the steps' CUDA graphs, in ms and over the first one's, or the reason."""
    plays = []
    for row, step in zip(rows, steps):
        try:
            plays.append((row, recorded(step)))
        except NotRecorded as error:
            row["recorded_note"] = str(error)
            if row is rows[0]:
                for other in rows[1:]:
                    other["recorded_note"] = f"not tried, since {row['name']} was not recorded"
                return
    times = interleave([play for _, play in plays], rounds, budget=budget, device=device)
    for (row, _), seconds in zip(plays, times):
        found = summary(seconds, times[0])
        row |= {f"recorded_{key}": found[key] for key in ("ms", "ratio")}


def markdown(rows: list[Row]) -> str:
    names = [name for name in parts.NAMES if any(row["parts_ms"][name] > 0 for row in _split(rows))]
    memory = any("peak_bytes" in row for row in rows)
    graphs = any("recorded_ms" in row for row in rows)
    cells = []
    for row in rows:
        split = _parts(row)
        shares = [f"{100 * split[n] / sum(split.values()):.0f} %" if split else "" for n in names]
        shape = " x ".join(str(n) for n in row["shape"])
        kernels = row["kernels"] or ""
        times = [row["rounds"], spread(row, "ms"), spread(row)]
        if graphs:
            shown = "recorded_ms" in row
            times += (
                [short(row["recorded_ms"]), short(row["recorded_ratio"])] if shown else ["", ""]
            )
        peak = [megabytes(row.get("peak_bytes"))] if memory else []
        cells.append([shape, row["name"], row["dtype"], kernels, *times, *peak, *shares])
    columns = ["shape", "layer", "dtype", "kernels", "rounds", f"ms {SPREAD}", "over nn.Linear"]
    columns += ["in a CUDA graph, ms", "over nn.Linear's"] if graphs else []
    return table([*columns, *(["peak MB"] if memory else []), *names], cells)


def _parts(row: Row) -> dict[str, float] | None:
    """Return ms by part; None for `WHOLE` (in older records all of its time is `rest`)."""
    return None if row["name"] in WHOLE else row.get("parts_ms")


def _split(rows: list[Row]) -> list[Row]:
    return [row for row in rows if _parts(row)]


def draw(rows: list[Row], path: Path) -> None:
    """Draw the first shape as bars as long as `ratio`, split by the instrumented steps' shares."""
    shape = rows[0]["shape"]
    base = rows[0]
    shown = [row for row in _split(rows) if row["shape"] == shape and row["dtype"] == base["dtype"]]
    colours = (
        "#000000",
        "#0072B2",
        "#D55E00",
        "#CC79A7",
        "#E69F00",
        "#F0E442",
        "#56B4E9",
        "#009E73",
        "#999999",
    )
    found, axes = figure(1, 1, (8.5, 0.42 * len(shown) + 1.9))
    axis = axes[0, 0]
    labels = [f"{row['name']}  ({row['kernels']})" for row in shown]
    left = [0.0] * len(shown)
    for name, colour in zip(parts.NAMES, colours, strict=True):
        widths = [
            row["ratio"] * row["parts_ms"][name] / sum(row["parts_ms"].values()) for row in shown
        ]
        if max(widths) > 0:
            axis.barh(labels, widths, left=left, label=name, color=colour)
        left = [a + b for a, b in zip(left, widths)]
    axis.axvline(1, color="black", lw=1, ls="--")
    size = " x ".join(str(n) for n in shape)
    axis.set(xlabel=f"time over nn.Linear, forward and backward, {base['dtype']}, {size}")
    axis.invert_yaxis()
    found.legend(loc="outside lower center", ncols=4, frameon=False)
    found.savefig(path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--paper", type=Path, help="folder of a checkout of the paper's released code"
    )
    args = parse(parser)
    if args.paper is not None and args.device.type == "cuda":
        parser.error("the paper's code is timed only on a CPU; omit --paper or --device cuda")
    prepare(args.threads)
    before = before_start(args.device)
    shapes = GPU_SHAPES if args.device.type == "cuda" else SHAPES
    shapes = QUICK_SHAPES if args.quick else shapes
    rounds = 2 if args.quick else ROUNDS
    rows: list[Row] = []
    for shape in shapes:
        rows += measure(shape, rounds, BUDGET / len(shapes), args.device, args.paper)
    print(markdown(rows))
    write(args.out, "layer", {"machine": before, "rows": rows})
    draw(rows, args.out / "layer.png")


if __name__ == "__main__":
    main()
