"""The dry run of a comparison: tokens, steps, time, memory, and published results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers import AutoConfig, PreTrainedConfig

from metis_hf.conversion.convert import get_metis_model
from metis_hf.conversion.report import gemm_weights
from metis_hf.data.chunked import META, read_meta
from metis_hf.lab.compare import published
from metis_hf.lab.compare.plan import ComparisonPlan
from metis_hf.lab.compare.variants import Variant
from metis_hf.lab.cost import meta_model
from metis_hf.lab.rank_memory import Workload, rank_memory
from metis_hf.lab.show.table import terminal_table
from metis_hf.lab.step_time import (
    DEVICES,
    PYTHON,
    RECORDED,
    WEEK,
    Device,
    about,
    device_for,
    step_seconds,
)
from metis_hf.lab.training_plan import step_flops
from metis_hf.layers.experts import has_fused_experts
from metis_hf.shared.numbers import gib, si


def show_plan(plan: ComparisonPlan, console: Console, device: str | None = None) -> None:
    """Print what a comparison would train, and for how long; nothing is trained or written.

    `device` is one of `step_time.DEVICES`; None: `device_for` chooses.
    """
    config = AutoConfig.for_model(**plan.experiment.model)
    for line in describe(plan, config):
        console.print(f"- {line}")
    beside, seconds = published.match(plan), {v.name: times(plan, config, v) for v in plan.variants}
    each = len(plan.seeds)
    name = device or device_for(sum(each * found["cpu"][PYTHON] for found in seconds.values()))
    chosen = DEVICES[name]
    titles = ["Variant", *(chosen.ways if len(chosen.ways) > 1 else ["time"])]
    if beside is not None and beside.losses:
        titles += ["Published as", *(["Loss"] if beside.exact else []), "Gap, %"]
    cells = [row(variant, found[name], chosen, beside) for variant, found in seconds.items()]
    console.print(terminal_table(titles, cells, title=f"A run on one {chosen.name}"))
    total = sum(each * min(found[name].values()) for found in seconds.values())
    memory = control_memory(plan, config, bf16=name != "cpu")
    whole = "an unknown time" if math.isnan(total) else f"about {about(total)}"
    console.print(f"All {len(plan.runs())} runs take {whole} on one {chosen.name}.")
    for sentence in remarks(plan, chosen, total, memory):
        console.print(f"- {sentence}")
    if beside is not None:
        console.print(f"- {published.describe(beside)}")
        for sentence in beside.differences:
            console.print(f"- {sentence}")
    console.print("Nothing was trained.")


def describe(plan: ComparisonPlan, config: PreTrainedConfig) -> list[str]:
    """Return the facts that all runs share, a line each."""
    model = meta_model(config)
    total, body = sum(p.numel() for p in model.parameters()), published.body_parameters(config)
    load, count = _workload(plan), len(plan.runs())
    lines = [
        f"Model: {config.model_type}, {total:,} parameters, {body:,} without embeddings and head",
        f"Tokens per run: {plan.tokens:,}, {plan.tokens / body:.3g} per parameter without "
        "embeddings and head",
        f"Steps: {plan.experiment.steps:,} of {load.global_batch} sequences x "
        f"{load.sequence_length} tokens, in micro-batches of {load.device_batch} on one device",
        f"Runs: {count}, {len(plan.variants)} variants x {len(plan.seeds)} "
        f"seed{'s' * (len(plan.seeds) > 1)} ({', '.join(map(str, plan.seeds))})",
    ]
    if not has_fused_experts(model):
        flops = load.steps * sum(step_flops(model, gemm_weights(model), load).values())
        lines.append(f"Model FLOPs per run: {si(flops, 'FLOP')}")
    return [*lines, f"Data: {_describe_data(plan)}"]


def times(
    plan: ComparisonPlan, config: PreTrainedConfig, variant: Variant
) -> dict[str, dict[str, float]]:
    """Return device -> way to launch -> estimated seconds of a run; NaN for fused experts."""
    model, load = meta_model(config), _workload(plan)
    if has_fused_experts(model):
        return {name: dict.fromkeys(each.ways, math.nan) for name, each in DEVICES.items()}
    gemms = gemm_weights(model)
    get_metis_model(model, variant.metis_config(plan.seeds[0]))
    flops = step_flops(model, gemms, load)
    return {
        name: {way: load.steps * s for way, s in step_seconds(model, flops, load, each).items()}
        for name, each in DEVICES.items()
    }


def control_memory(plan: ComparisonPlan, config: PreTrainedConfig, *, bf16: bool) -> float:
    """Return the bytes of a run without quantizers (`rank_memory`); NaN for fused experts."""
    model, load = meta_model(config), replace(_workload(plan), bf16=bf16)
    if has_fused_experts(model):
        return math.nan
    return sum(rank_memory(model, load, sharded=False).values())


def row(
    variant: str, seconds: Mapping[str, float], device: Device, beside: published.Beside | None
) -> list[str]:
    """Return the table cells of a variant: its name, times and published results."""
    cells = [about(seconds[way]) if way in seconds else "" for way in device.ways]
    theirs: list[str] = []
    if beside is not None and beside.losses:
        label, loss, gap = beside.cells(beside.names.get(variant))
        theirs = [label, *loss, gap]
    return [variant, *cells, *theirs]


def remarks(plan: ComparisonPlan, device: Device, total: float, memory: float) -> Iterator[str]:
    """Yield a sentence each on the source of the times, on memory, and for warnings.

    `total` is the seconds of all runs, `memory` the bytes of a run without quantizers.
    """
    yield f"Times are {device.source}. They exclude compilation, data loading and evaluation."
    if not math.isnan(memory):
        yield f"Memory per run: about {gib(memory)} without quantizers; with them, somewhat less."
    if RECORDED in device.ways:
        yield "`compare` automatically records steps as CUDA graphs for schemes that support it."
    if any(variant.precision_schedule for variant in plan.variants):
        yield "For a run that switches precision, the estimate ignores the switch."
    if total > WEEK:
        yield "Warning: the runs take more than a week; lower --tokens, --seeds or --schemes first."
    if device.memory is not None and memory > device.memory * 2**30:
        yield f"Warning: one {device.name} has {device.memory} GiB, which is too little for a run."


def _workload(plan: ComparisonPlan) -> Workload:
    return Workload(
        steps=plan.experiment.steps,
        sequence_length=plan.experiment.sequence_length,
        global_batch=plan.global_batch,
        device_batch=min(
            plan.experiment.training["per_device_train_batch_size"], plan.global_batch
        ),
    )


def _describe_data(plan: ComparisonPlan) -> str:
    if plan.data is None:
        return (
            "the sources of Python's standard library"
            if plan.embedded
            else "none; a run needs --data DIR with text files or chunked tokens"
        )
    if not Path(plan.data).is_dir():
        return f"{plan.data}, which is not a directory on this machine"
    if plan.text is not None:
        return f"{plan.data}, text that is tokenized before the first run"
    if not (Path(plan.data) / META).is_file():
        return plan.data
    held = read_meta(Path(plan.data))["num_tokens"]
    passes = plan.tokens / held
    return f"{plan.data}, {held:,} tokens" + (
        f": a run reads them {passes:.3g} times" if passes > 1 else ""
    )
