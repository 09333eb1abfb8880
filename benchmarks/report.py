"""Write the tables of docs/performance.md and benchmarks/README.md from results/*.json.

    python benchmarks/report.py

Each table goes between `<!-- table: NAME -->` and `<!-- end -->`. No number is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import engine
import first_step
import imports
import layer
import parts
import quantizers
import roofline
import scaling
import step
from gpu import PARTS
from on_gpu.record import DONE, WAITING
from timing import RESULTS, Row, short, table, with_tables

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "README.md"]
QUANTIZED_SHAPE = [4096, 1024]
LAYER_SHAPE = [8192, 1024, 1024]
GPU_SHAPE = [16384, 4096, 4096]
GPT2, SMOLLM2 = "GPT-2 130M", "SmolLM2 135M"


def read(name: str) -> Row:
    return json.loads((RESULTS / f"{name}.json").read_text())


def find(rows: list[Row], **wanted: object) -> Row | None:
    return next((r for r in rows if all(r.get(k) == v for k, v in wanted.items())), None)


class Measured(NamedTuple):
    """A number from the records, and the rounds of its timing (None for counted bytes)."""

    value: float
    rounds: int | None = None


def measured(row: Row | None, key: str = "ratio", unit: float = 1.0) -> Measured | None:
    """Return a number of a row divided by `unit`; only timed numbers have quartiles and rounds."""
    if row is None:
        return None
    return Measured(row[key] / unit, row["rounds"] if f"quartiles_{key}" in row else None)


# --- targets --------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A limit, and the function that finds the recorded number (None: not measured)."""

    what: str
    limit: float
    measure: Callable[[], Measured | None]
    at_least: bool = False


def quantizer(name: str, dtype: str = "float32") -> Callable[[], Measured | None]:
    wanted = {"name": name, "dtype": dtype, "kernels": "compiled", "shape": QUANTIZED_SHAPE}
    return lambda: measured(find(read("quantizers")["rows"], **wanted))


def layer_row(name: str, kernels: str | None = "compiled") -> Row | None:
    rows = read("layer")["rows"]
    return find(rows, name=name, kernels=kernels, dtype="float32", shape=LAYER_SHAPE)


def layer_ratio(name: str) -> Callable[[], Measured | None]:
    return lambda: measured(layer_row(name))


def paper_over_ours() -> Measured | None:
    paper, ours = layer_row(layer.PAPER, None), layer_row("metis")
    if paper is None or ours is None:
        return None
    return Measured(paper["ms"] / ours["ms"], ours["rounds"])


def share(*names: str) -> Callable[[], Measured | None]:
    """Return a function for the parts' percentage of the metis layer's time."""

    def measure() -> Measured | None:
        row = layer_row("metis")
        if row is None:
            return None
        split = row["parts_ms"]
        percent = 100 * sum(split[name] for name in names) / sum(split.values())
        return Measured(percent, row.get("parts_rounds"))

    return measure


def moved(operand: str) -> Callable[[], Measured | None]:
    wanted = {"operand": operand, "kernels": "compiled"}
    return lambda: measured(find(read("roofline")["traffic"], **wanted), "over_copy")


def step_value(
    key: str, dtype: str, model: str = GPT2, name: str = "metis"
) -> Callable[[], Measured | None]:
    batch = [step.SHAPES[model].batch, step.SHAPES[model].length]
    wanted = {"model": model, "name": name, "dtype": dtype, "batch": batch}
    return lambda: measured(find(read("step")["rows"], **wanted), key)


def import_seconds() -> Measured | None:
    return measured(find(read("imports")["rows"], name=imports.NAME), "ms", 1e3)


def first_step_seconds() -> Measured | None:
    row = find(read("first_step")["rows"], name=first_step.EMPTY)
    return measured(row, "ms", 1e3)


def gpu_records() -> dict[str, Row]:
    """Return name -> record of `make gpu` on one machine."""
    return {path.stem: read(path.stem) for path in sorted(RESULTS.glob("gpu-*.json"))}


def gpu_layer_ratio(name: str) -> Callable[[], Measured | None]:
    """Return a function for the ratio on an H100 or H200, whose peak FLOP rates are equal."""

    def measure() -> Measured | None:
        wanted = {"name": name, "kernels": "triton", "dtype": "bfloat16", "shape": GPU_SHAPE}
        for record in gpu_records().values():
            items = record["parts"].get("layer", {}).get("items", {}).values()
            rows = [row for item in items for row in item.get("rows", ())]
            row = find(rows[::-1], **wanted)  # the latest row
            if row is not None and re.search("H100|H200", record["machine"].get("gpu", "")):
                return measured(row)
        return None

    return measure


_LAYER = "linear 8192 x 1024 x 1024, forward and backward, over nn.Linear, fp32: "
TARGETS = [
    Target("NVFP4 nearest, one level, fp32 4096 x 1024, over a copy", 2.2,
           quantizer("nvfp4, one level")),
    Target("NVFP4 nearest, two levels", 3.0, quantizer("nvfp4")),
    Target("NVFP4 stochastic, two levels", 4.0, quantizer("nvfp4, stochastic")),
    Target("bf16 tensor, nearest, two levels, over a copy of the fp32 tensor", 3.0,
           quantizer("nvfp4", "bfloat16")),
    Target("bf16 tensor, stochastic, two levels", 4.5, quantizer("nvfp4, stochastic", "bfloat16")),
    Target(_LAYER + "nvfp4", 1.12, layer_ratio("nvfp4")),
    Target("the same, nvidia", 1.30, layer_ratio("nvidia")),
    Target("the same, metis", 1.28, layer_ratio("metis")),
    Target("the paper's released layer, its splits on, over metis", 3.5, paper_over_ours, True),
    Target("subspace and projection, % of the metis layer", 10,
           share(parts.SUBSPACE, parts.PROJECT)),
    Target("bytes moved per quantized operand, direct, over a copy", 2, moved("direct")),
    Target("the same, with the split", 4, moved("split")),
    Target("GPT-2 130M step, batch 4 x 512, metis over fp32", 1.5, step_value("ratio", "float32")),
    Target("its linear layers' saved activations, metis over bf16", 0.33,
           step_value("saved_over_bf16", "float32")),
    Target("SmolLM2 135M step, batch 4 x 256, nvfp4-rne over fp32", 1.25,
           step_value("ratio", "float32", SMOLLM2, "nvfp4-rne")),
    Target("the same, metis", 1.6, step_value("ratio", "float32", SMOLLM2)),
    Target("names of metis_hf for a training, beyond those of transformers, s", 0.3,
           import_seconds),
    Target("first `metis` step with nothing compiled, beyond the second, s", 4,
           first_step_seconds),
    Target("H100 or H200, 16384 x 4096 x 4096, nvfp4 over bf16 nn.Linear", 1.8,
           gpu_layer_ratio("nvfp4")),
    Target("the same, metis", 2.2, gpu_layer_ratio("metis")),
]  # fmt: skip


def targets_markdown() -> str:
    cells = []
    for target in TARGETS:
        found = target.measure()
        sign = ">=" if target.at_least else "<="
        number, rounds, verdict = "-", "", "not measured"
        if found is not None:
            reached = (
                found.value >= target.limit if target.at_least else found.value <= target.limit
            )
            verdict = "met" if reached else "missed"
            number, rounds = short(found.value), str(found.rounds or "")
        cells.append([target.what, f"{sign} {target.limit:g}", number, rounds, verdict])
    return table(["what", "target", "measured", "rounds", ""], cells)


# --- tables ---------------------------------------------------------------------------------------


def beyond_markdown() -> str:
    """Return the table of the time that each layer adds to nn.Linear."""
    base, ours = layer_row(layer.NN_LINEAR, None), layer_row("metis")
    assert base is not None
    assert ours is not None
    cells = []
    for row in read("layer")["rows"]:
        same = (row["shape"], row["dtype"]) == (LAYER_SHAPE, "float32")
        if same and row["name"] not in (layer.NN_LINEAR, "bf16"):
            extra = row["ms"] - base["ms"]
            over = short(extra / (ours["ms"] - base["ms"]))
            cells.append([row["name"], row["kernels"] or "", short(extra), over])
    return table(["layer", "kernels", "ms beyond nn.Linear", "over metis, compiled"], cells)


def headline_markdown() -> str:
    """Return the table of each scheme's cost: one layer, and the steps of the models."""
    steps = read("step")["rows"]
    models = list(dict.fromkeys(row["model"] for row in steps))

    def cells(name: str, dtype: str) -> list[str]:
        found = [find(steps, model=model, name=name, dtype=dtype) or {} for model in models]
        alone = layer_row(name) if dtype == "float32" else None
        numbers = [alone and alone["ratio"]]
        for key in ("ratio", "saved_over_bf16"):
            numbers += [row.get(key) for row in found]
        return ["" if number is None else short(number) for number in numbers]

    schemes = [*step.SCHEMES, *(name for shape in step.SHAPES.values() for name in shape.schemes)]
    rows = [[name, *cells(name, "float32")] for name in dict.fromkeys(schemes)]
    rows += [[f"{name}, bf16 GEMMs", *cells(name, "bfloat16")] for name in (step.PLAIN, "metis")]
    columns = ["", "one layer, over nn.Linear"]
    columns += [f"{model} step, over fp32" for model in models]
    columns += [f"{model}: saved by linears, of bf16's" for model in models]
    return table(columns, rows)


def machines_markdown() -> str:
    cells = []
    for name in ("quantizers", "layer", "step", "scaling", "roofline", "imports", "first_step"):
        machine = read(name)["machine"]
        before = f"load {machine['load'][0]:.1f}" if "load" in machine else "not known"
        if machine.get("busy") is not None:
            before = f"{100 * machine['busy']:.0f} %"
        units = "yes" if machine["bf16_units"] else "no"
        cells.append(
            [
                name,
                machine["processor"],
                machine["capability"],
                units,
                f"{machine['threads']} of {machine['cores']}",
                machine["torch"],
                before,
            ]
        )
    columns = ["benchmark", "processor", "vectors", "bf16 units", "threads", "torch"]
    return table([*columns, "busy before"], cells)


def gpus_markdown() -> str:
    cells = []
    for name, record in gpu_records().items():
        states: dict[str, list[str]] = {}
        for part in PARTS:
            state = record["parts"].get(part, {"state": WAITING})["state"]
            states.setdefault(state, []).append(part)
        done = ", ".join(states.pop(DONE, []))
        others = "; ".join(f"{', '.join(names)}: {state}" for state, names in states.items())
        machine = record["machine"]
        title = machine.get("gpu", name)
        cells.append([f"[{title}]({name}.md)", machine["torch"], done, others])
    if not cells:
        return "No GPU has been measured.\n"
    return table(["GPU", "torch", "measured", "other parts"], cells)


def first_step_markdown() -> str:
    cells = [[row["name"], short(row["ms"] / 1e3)] for row in read("first_step")["rows"]]
    return table(["", "first step beyond the second, s"], cells)


def tables() -> dict[str, str]:
    """Return name -> markdown for all tables that a page may show."""
    rows = read("quantizers")["rows"]
    quantized = [row for row in rows if row["shape"] == QUANTIZED_SHAPE]
    reached, sweeps = read("roofline"), read("scaling")
    return {
        "targets": targets_markdown(),
        "headline": headline_markdown(),
        "machines": machines_markdown(),
        "gpus": gpus_markdown(),
        "quantizers": quantizers.markdown(quantized),
        "first_step": first_step_markdown(),
        "engine": engine.markdown(read("engine")),
        "layer": layer.markdown(read("layer")["rows"]),
        "beyond": beyond_markdown(),
        "step": step.markdown(read("step")["rows"]),
        "scaling": scaling.markdown(sweeps["rows"]),
        "slopes": scaling.slopes_markdown(sweeps["slopes"]),
        "traffic": roofline.traffic_markdown(reached["traffic"]),
        "bandwidth": roofline.bandwidth_markdown(reached["bandwidth"]),
        "predictions": roofline.prediction_markdown(reached["predictions"]),
    }


def main() -> None:
    found = tables()
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), found))
    print(found["targets"])


if __name__ == "__main__":
    main()
