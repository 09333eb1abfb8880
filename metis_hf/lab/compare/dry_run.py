"""A comparison before it is paid for: model, tokens, steps, FLOPs, and what is published."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from transformers import AutoConfig, PreTrainedConfig

from metis_hf.conversion.convert import get_metis_model
from metis_hf.conversion.report import gemm_weights
from metis_hf.data.chunked import META, read_meta
from metis_hf.lab.compare import published
from metis_hf.lab.compare.plan import ComparisonPlan
from metis_hf.lab.compare.variants import Variant
from metis_hf.lab.cost import meta_model, model_overhead
from metis_hf.lab.rank_memory import Workload
from metis_hf.lab.show.table import terminal_table
from metis_hf.lab.training_plan import step_flops
from metis_hf.layers.experts import has_fused_experts
from metis_hf.shared.numbers import si


def show_plan(plan: ComparisonPlan, console: Console) -> None:
    """Print what a comparison would train; nothing is trained or written.

    FLOPs count the model: the three GEMMs of each layer, output head and attention. Beside
    them stands what the scheme multiplies besides, where FP4 units run its GEMMs.
    """
    config = AutoConfig.for_model(**plan.experiment.model)
    for line in describe(plan, config):
        console.print(f"- {line}")
    beside = published.match(plan)
    console.print(
        terminal_table(header(beside), rows(plan, config, beside), title="One run of each variant")
    )
    if any(variant.precision_schedule for variant in plan.variants):
        console.print("- Of a run whose precision switches, the FLOPs are those without a switch.")
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
        f"Tokens of a run: {plan.tokens:,}, {plan.tokens / body:.3g} for each of these",
        f"Steps: {plan.experiment.steps:,} of {load.global_batch} sequences x "
        f"{load.sequence_length} tokens, in micro-batches of {load.device_batch} on one device",
        f"Runs: {count}, {len(plan.variants)} variants x {len(plan.seeds)} "
        f"seed{'s' * (len(plan.seeds) > 1)} ({', '.join(map(str, plan.seeds))})",
    ]
    return [*lines, f"Data: {_describe_data(plan)}"]


def header(beside: published.Beside | None) -> list[str]:
    """Return the titles of the columns of `rows`."""
    theirs: list[str] = []
    if beside is not None and beside.losses:
        theirs = ["Published as", *(["Loss"] if beside.exact else []), "Gap, %"]
    return ["Variant", "FLOPs of a run", "+ the scheme's, %", *theirs]


def rows(
    plan: ComparisonPlan, config: PreTrainedConfig, beside: published.Beside | None
) -> list[list[str]]:
    """Return a row of cells for each variant of a plan."""
    cells = []
    for variant in plan.variants:
        total, added = run_flops(plan, config, variant)
        flops = ["not counted", ""]
        if not math.isnan(total):
            flops = [si(total, "FLOP"), f"{100 * added / total:.1f}"]
        theirs: list[str] = []
        if beside is not None and beside.losses:
            label, loss, gap = beside.cells(beside.names.get(variant.name))
            theirs = [label, *loss, gap]
        cells.append([variant.name, *flops, *theirs])
    return cells


def run_flops(
    plan: ComparisonPlan, config: PreTrainedConfig, variant: Variant
) -> tuple[float, float]:
    """Return the FLOPs of a run of the model, and the scheme's beside; NaN with fused experts."""
    model = meta_model(config)
    if has_fused_experts(model):
        return math.nan, math.nan
    gemms = gemm_weights(model)
    metis, load = variant.metis_config(plan.seeds[0]), _workload(plan)
    get_metis_model(model, metis)
    flops, steps = step_flops(model, gemms, load), load.steps
    passed = load.device_batch * load.sequence_length
    added = flops["gemm"] * model_overhead(config, metis, passed).share
    return steps * sum(flops.values()), steps * added


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
            else "none is given; a run needs --data DIR, text files or chunked tokens"
        )
    if not Path(plan.data).is_dir():
        return f"{plan.data}, which is no directory on this machine"
    if plan.text is not None:
        return f"{plan.data}, text that is tokenized before the first run"
    if not (Path(plan.data) / META).is_file():
        return plan.data
    held = read_meta(Path(plan.data))["num_tokens"]
    passes = plan.tokens / held
    return f"{plan.data}, {held:,} tokens" + (
        f": a run reads them {passes:.3g} times" if passes > 1 else ""
    )
