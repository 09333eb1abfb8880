"""Estimate the cost of a training run: parameters, tokens, steps, time, memory.

Nothing is allocated: parameters are counted on the meta device, and saved activations by tracing a
forward pass with fake tensors. Only dense decoders of attention and linear layers are supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig, PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model, metis_layers
from metis_hf.conversion.report import gemm_weights
from metis_hf.lab.cost import meta_model, model_overhead
from metis_hf.lab.rank_memory import Workload, blocks_of, count_elements, rank_memory
from metis_hf.lab.show.table import terminal_table
from metis_hf.lab.step_time import DEVICES, PYTHON, RECORDED, WEEK, about, device_for, step_seconds
from metis_hf.layers.experts import has_fused_experts
from metis_hf.shared.numbers import gib, si

# transformers' names of softmax attention in `layer_types`; "attention" in older configs.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


@dataclass(frozen=True)
class Plan:
    """The result of `plan_training`."""

    model_type: str  # transformers' name of the architecture
    scheme: str
    workload: Workload
    # Counts: "total" as stored; "original" before conversion; "converted" weights of the original
    # whose GEMMs are quantized.
    parameters: dict[str, int]
    flops: dict[str, float]  # of one optimizer step over all processes, by kind: see `step_flops`
    added_share: float  # multiply-adds beyond the converted layers' GEMMs: see `cost.overhead`
    memory: dict[str, dict[str, int]]  # bytes by kind, "DDP" and "FSDP2": see `rank_memory`
    # Estimate for one optimizer step: device (`step_time.DEVICES`) -> way to launch -> seconds.
    seconds: dict[str, dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON-ready dict, derived numbers included."""
        load, step = self.workload, sum(self.flops.values())
        return asdict(self) | {
            "tokens_per_step": load.tokens_per_step,
            "tokens": load.tokens_per_step * load.steps,
            "steps": load.steps,
            "accumulation": load.accumulation,
            "flops_per_step": step,
            "flops_total": step * load.steps,
            "memory_total": {name: sum(kinds.values()) for name, kinds in self.memory.items()},
        }


def plan_training(config: PreTrainedConfig, metis: MetisConfig, workload: Workload) -> Plan:
    """Plan the training of a dense decoder model (Llama, GPT-2, ...) from scratch.

    Raises:
        ValueError: a model with layers other than attention and linear ones, checkpointing of a
            model whose blocks are unknown; or as `get_metis_model`.
    """
    _check_layers(config)
    model = meta_model(config)
    original, gemms = count_elements(model), gemm_weights(model)
    if has_fused_experts(model) or any("Expert" in type(m).__name__ for m in model.modules()):
        raise ValueError(
            f"{config.model_type} has fused experts, and the number of tokens that each expert "
            "sees is not known before the run, so the run cannot be planned"
        )
    if workload.checkpointing and next(blocks_of(model), None) is None:
        raise ValueError(
            f"{type(model).__name__} does not say which of its modules are blocks "
            "(_no_split_modules), so activation checkpointing cannot be planned; plan the run "
            "without it"
        )
    get_metis_model(model, metis)
    counts = {
        "total": count_elements(model),
        "original": original,
        "converted": sum(x.in_features * x.out_features for _, x in metis_layers(model)),
    }
    ways, flops = {"DDP": False, "FSDP2": True}, step_flops(model, gemms, workload)
    passed = workload.device_batch * workload.sequence_length
    return Plan(
        model_type=config.model_type,
        scheme=metis.scheme,
        workload=workload,
        parameters=counts,
        flops=flops,
        added_share=model_overhead(config, metis, passed).share,
        memory={name: rank_memory(model, workload, sharded=way) for name, way in ways.items()},
        seconds={
            name: step_seconds(model, flops, workload, device) for name, device in DEVICES.items()
        },
    )


def _check_layers(config: PreTrainedConfig) -> None:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if others := sorted(set(kinds or ()) - _ATTENTION):
        found = f"layers of {', '.join(others)}"
    elif getattr(config, "is_encoder_decoder", False):
        found = "an encoder and a decoder"
    elif config.get_text_config() is not config:
        found = "a text model among other parts"
    elif getattr(config, "num_attention_heads", None) is None:
        found = "no attention heads (num_attention_heads)"
    else:
        return
    raise ValueError(
        f"{config.model_type} has {found}; only dense decoders with attention can be planned"
    )


def step_flops(
    model: PreTrainedModel, gemms: Mapping[str, float], load: Workload
) -> dict[str, float]:
    """Return FLOPs of one optimizer step of the dense model by kind, over all processes.

    - "gemm": converted layers, 6 per weight and token.
    - "other_gemm": output head and unconverted layers, also 6.
    - "attention": Q K^T and P V, 12 l t s h d for l layers, t tokens in sequences of length s and
      h heads of size d (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B), without subtracting
      the masked half.
    - "recomputation": one more forward pass of the blocks under activation checkpointing.

    `gemms` maps modules to multiplications per token before the conversion (`gemm_weights`).
    """
    tokens, config = load.tokens_per_step, model.config
    converted = sum(layer.in_features * layer.out_features for _, layer in metis_layers(model))
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    forward = 4.0 * config.num_hidden_layers * tokens * load.sequence_length * heads * size
    again = 0.0
    if load.checkpointing:
        blocks = {id(block) for block in blocks_of(model)}
        prefixes = tuple(f"{name}." for name, m in model.named_modules() if id(m) in blocks)
        inside = sum(size for name, size in gemms.items() if name.startswith(prefixes))
        again = 2.0 * tokens * inside + forward
    return {
        "gemm": 6.0 * tokens * converted,
        "other_gemm": 6.0 * tokens * (sum(gemms.values()) - converted),
        "attention": 3 * forward,
        "recomputation": again,
    }


def print_plan(
    plan: Plan, console: Console | None = None, *, device: str | None = None, runs: int = 1
) -> None:
    """Print the plan of one run as two tables, and the time of `runs` such runs.

    `device` is one of `step_time.DEVICES`; None: `device_for` chooses.
    """
    console, load, counts = console or Console(), plan.workload, plan.parameters
    run = {
        "Parameters": f"{counts['original']:,}",
        "  as stored": f"{counts['total']:,}",
        "  with quantized GEMMs": f"{counts['converted']:,}",
        "Tokens": f"{load.tokens_per_step * load.steps:,}",
        "  per step": f"{load.tokens_per_step:,}",
        "Steps": f"{load.steps:,}",
        "Ranks x accumulation x sequences x length": f"{load.world_size} x {load.accumulation} x "
        f"{load.device_batch} x {load.sequence_length}",
        "FLOPs of the model": si(sum(plan.flops.values()) * load.steps, "FLOP"),
    }
    name = device or device_for(runs * load.steps * plan.seconds["cpu"][PYTHON])
    chosen, step = DEVICES[name], plan.seconds[name]
    for way, seconds in step.items():
        how = f", {way}" if RECORDED in chosen.ways else ""
        time = load.steps * seconds
        run[f"Time on {load.world_size} x {chosen.name}{how}"] = f"about {about(time)}"
        if runs > 1:
            run[f"  of all {runs} runs{how}"] = f"about {about(runs * time)}"
    console.print(_table(plan.model_type, ("",), {name: (text,) for name, text in run.items()}))
    kinds = dict.fromkeys(kind for memory in plan.memory.values() for kind in memory)
    memory = {
        kind: [gib(held[kind]) if kind in held else "" for held in plan.memory.values()]
        for kind in kinds
        if any(held.get(kind) for held in plan.memory.values())
    }
    totals = [sum(held.values()) for held in plan.memory.values()]
    memory["total"] = [gib(total) for total in totals]
    console.print(_table("Memory of a rank", plan.memory, memory))
    said = [f"Times are {chosen.source}. They exclude communication, data loading and evaluation."]
    if RECORDED in step:
        said.append("Recipes automatically record steps as CUDA graphs, except for lora.")
    said.append("Memory excludes temporaries, fragmentation and the framework itself.")
    if runs * load.steps * step[PYTHON] > WEEK:
        said.append("Warning: the training takes more than a week; lower --tokens first.")
    if chosen.memory is not None and min(totals) > chosen.memory * 2**30:
        said.append(
            f"Warning: {chosen.name} has {chosen.memory} GiB, which is too little for a rank."
        )
    for line in said:
        console.print(line, highlight=False)


def _table(title: str, columns, rows) -> Table:
    lines = [[name.replace("_", " "), *cells] for name, cells in rows.items()]
    return terminal_table(["", *columns], lines, title=title)
