"""A plan as tables for people; `planning.Plan.to_dict` is the same for programs."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from metis_hf.lab.planning.plan import Plan
from metis_hf.shared.numbers import gib, si

_MEMORY = {
    "weights": "Weights (fp32)",
    "gradients": "Gradients (fp32)",
    "moments": "Optimizer moments (AdamW)",
    "scheme_state": "State of the scheme (buffers)",
    "gradient_buckets": "Gradient buckets",
    "gathered": "Gathered weights and gradients (estimate)",
    "linear_activations": "Saved activations, converted layers",
    "activations": "Saved activations, rest",
    "weight_copies": "bf16 copies of dense weights",
    "loss_gradient": "Gradient of the logits",
}
_FLOPS = {
    "gemm": "GEMMs of converted layers",
    "other_gemm": "Other GEMMs (output head, ...)",
    "attention": "Attention",
    "recomputation": "Recomputed forward pass",
    "subspace": "+ range finder",
    "factorization": "+ its bases and eigenvectors",
    "projection": "+ projection",
    "low_rank": "+ low-rank part and residual",
    "corrections": "+ corrections",
    "weight_factors": "+ thin factors of weights",
    "elementwise": "+ means, scales (elementwise)",
    "rotation": "+ Hadamard and other rotations",
    "quantizers": "+ quantizers (elementwise)",
}
_COMMUNICATION = {
    "all_reduce": "All-reduce of gradients (fp32)",
    "all_gather": "All-gather of weights",
    "reduce_scatter": "Reduce-scatter of gradients",
    "outputs_all_reduce": "All-reduce of outputs and input gradients",
    "logits_all_gather": "All-gather of logits",
    "scales_all_reduce": "All-reduce of tensor scales",
}


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan as four tables and what they leave out."""
    console = console or Console()
    for table in _tables(plan):
        console.print(table)
    if plan.uncut:
        console.print(f"Without tensor parallelism (TP): {plan.uncut}")
    step = plan.quantizer_bytes / plan.workload.world_size
    console.print(
        f"Emulated quantizers move {si(step, 'B')} of memory per rank and step; divided by the "
        "memory bandwidth of a device, that is the time they add, but for those of attention's "
        "products (attention=...), which are not counted. "
        "Memory leaves out their temporaries, fragmentation and the framework itself. "
        "Nothing here was measured on a device."
    )


def _tables(plan: Plan) -> Iterator[Table]:
    yield _run_table(plan)
    world = plan.workload.world_size
    yield _table_of_ways(f"Memory per rank, {world} ranks", plan.memory, _MEMORY, gib)
    flops = Table("FLOPs per step", "All ranks", "Share", title=f"Scheme {plan.scheme}")
    for name, label in _FLOPS.items():
        if value := plan.flops[name]:
            flops.add_row(label, si(value, "FLOP"), f"{value / plan.flops_per_step:.2%}")
    flops.add_row("Total", si(plan.flops_per_step, "FLOP"), "")
    flops.add_row(
        "Of that added by the scheme (+)",
        si(plan.added_flops, "FLOP"),
        f"{plan.added_flops / plan.flops_per_step:.2%}",
    )
    yield _aligned(flops)
    if world > 1:
        title = "Sent by each rank per step"
        yield _table_of_ways(title, plan.communication, _COMMUNICATION, gib)


def _run_table(plan: Plan) -> Table:
    load, counts = plan.workload, plan.parameters
    table = Table("Run", "", title=f"{plan.model_type}, {counts['original'] / 1e9:.3g}B parameters")
    share = counts["converted"] / counts["original"]
    for label, value in (
        ("Parameters as stored", f"{counts['total']:,}"),
        ("  before conversion", f"{counts['original']:,}"),
        ("  weights with quantized GEMMs", f"{counts['converted']:,} ({share:.1%})"),
        ("  stored as u, s, vh, residual", f"{counts['split']:,}"),
        ("  of these u, s, vh", f"{counts['added']:,}"),
        ("Tokens", f"{load.tokens:,}"),
        ("Tokens per step", f"{load.tokens_per_step:,}"),
        ("  sequences x length", f"{load.global_batch} x {load.sequence_length}"),
        (
            "  ranks x accumulation x sequences",
            f"{load.world_size} x {load.accumulation} x {load.device_batch}",
        ),
        ("Steps", f"{load.steps:,}"),
        ("FLOPs per step", si(plan.flops_per_step, "FLOP")),
        ("FLOPs in total", si(plan.flops_per_step * load.steps, "FLOP")),
    ):
        table.add_row(label, value)
    return _aligned(table)


def _table_of_ways(title: str, values: dict, labels: dict[str, str], text) -> Table:
    table = Table(title, *values)
    for name, label in labels.items():
        row = [kinds.get(name, 0) for kinds in values.values()]
        if any(row):
            table.add_row(label, *(text(value) if value else "" for value in row))
    table.add_row("Total", *(text(sum(kinds.values())) for kinds in values.values()))
    return _aligned(table)


def _aligned(table: Table) -> Table:
    for column in table.columns[1:]:
        column.justify = "right"
    return table
