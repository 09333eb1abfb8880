"""The plan of a training run before it is paid for: memory, FLOPs and communication.

Nothing is allocated: parameters are counted on the meta device, and saved activations by tracing a
forward pass with fake tensors. Costs of single layers are in `costs`. Dense decoders of attention
alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model, metis_layers
from metis_hf.conversion.report import ConversionReport, gemm_weights
from metis_hf.lab.cost import meta_model
from metis_hf.lab.planning.communication import (
    block_names,
    blocks_of,
    communication,
    count_elements,
    resharded_units,
    tensor_parallel,
)
from metis_hf.lab.planning.costs import LayerCost, forward_cost, layer_cost
from metis_hf.lab.planning.saved_bytes import SavedBytes, trace_saved_bytes
from metis_hf.lab.planning.workload import BF16, DDP, FP32, FSDP2, TP, Workload
from metis_hf.layers.experts import has_fused_experts

# As transformers names layers of softmax attention in `layer_types`; "attention" in older configs.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


@dataclass(frozen=True)
class Plan:
    """The findings of `plan_run`; `planning.tables.print_plan` shows them.

    Attributes:
        model_type: architecture, as transformers calls it.
        scheme: of the model.
        workload: as given.
        parameters: counts: "total" as stored; "original" before conversion; "converted" weights of
            the original whose GEMMs are quantized; "split" stored for split weights (u, s, vh and
            residual); "added" by them (u, s and vh).
        memory: bytes on the fullest rank by kind, under "DDP" and "FSDP2".
        flops: of one optimizer step over all processes, by kind; see `LayerCost`.
        quantizer_bytes: memory traffic of the quantizers in one step over all processes.
        communication: bytes that one rank sends in one optimizer step, by kind, under "DDP",
            "FSDP2" and, where all layers can be cut, "TP".
        uncut: why tensor parallelism would refuse the model on several ranks, or None.
    """

    model_type: str
    scheme: str
    workload: Workload
    parameters: dict[str, int]
    memory: dict[str, dict[str, int]]
    flops: dict[str, float]
    quantizer_bytes: float
    communication: dict[str, dict[str, float]]
    uncut: str | None = None

    @property
    def flops_per_step(self) -> float:
        return sum(self.flops.values())

    @property
    def added_flops(self) -> float:
        """Return what the scheme adds to the dense model, in one step."""
        return sum(self.flops.get(name, 0.0) for name in _added_kinds())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan JSON-ready, derived numbers included."""
        load = self.workload
        return asdict(self) | {
            "tokens_per_step": load.tokens_per_step,
            "steps": load.steps,
            "accumulation": load.accumulation,
            "memory_total": {name: sum(kinds.values()) for name, kinds in self.memory.items()},
            "flops_per_step": self.flops_per_step,
            "flops_total": self.flops_per_step * load.steps,
            "flops_added_share": self.added_flops / self.flops_per_step,
            "communication_total": {
                name: sum(kinds.values()) for name, kinds in self.communication.items()
            },
        }


def plan_run(config: PreTrainedConfig, metis: MetisConfig, workload: Workload) -> Plan:
    """Return the plan of the training of a model from scratch.

    Args:
        config: of a dense decoder model (Llama, GPT-2, ...).
        metis: how it is converted.
        workload: what is trained.

    Raises:
        ValueError: an encoder-decoder, a model of several modalities, a mixture of experts or a
            model with layers other than attention (Mamba, hybrids), checkpointing of a model whose
            blocks are unknown, or what `get_metis_model` refuses.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{config.model_type} is an encoder-decoder; plans are for decoders only")
    if config.get_text_config() is not config:
        raise ValueError(
            f"{config.model_type} has a text model among others; plan that one alone, with "
            "config.get_text_config()"
        )
    if (others := _other_layers(config)) is not None:
        raise ValueError(
            f"{config.model_type} has {others}; plans are for dense decoders of attention alone"
        )
    model = meta_model(config)
    original = count_elements(model)
    gemms = gemm_weights(model)
    if _has_experts(model):
        raise ValueError(
            f"{config.model_type} has fused experts; how many tokens each sees is not known before "
            "the run, so it cannot be planned"
        )
    if workload.checkpointing and next(blocks_of(model), None) is None:
        raise ValueError(
            f"checkpointing=True: {type(model).__name__} does not say which of its modules are "
            "blocks (_no_split_modules), so what is computed again is not known. Plan it without "
            "checkpointing"
        )
    get_metis_model(model, metis)
    counts = parameter_counts(model, original)
    costs = step_costs(model, gemms, workload)
    sent, uncut = communication(model, workload), None
    if workload.world_size > 1:
        try:
            sent[TP] = tensor_parallel(model, workload)
        except NotImplementedError as error:
            uncut = str(error)
    memory = {name: rank_memory(model, workload, sharded=name == FSDP2) for name in (DDP, FSDP2)}
    return Plan(
        model_type=config.model_type,
        scheme=metis.scheme,
        workload=workload,
        parameters=counts,
        memory=memory,
        flops={name: value for name, value in costs.items() if name != "quantizer_bytes"},
        quantizer_bytes=costs["quantizer_bytes"],
        communication=sent,
        uncut=uncut,
    )


def _other_layers(config: PreTrainedConfig) -> str | None:
    """Return which layers a model has whose cost is not that of attention; None if there are none.

    Jamba's config and others' say `layers_block_type`.
    """
    if getattr(config, "num_attention_heads", None) is None:
        return "no attention heads (num_attention_heads)"
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    others = sorted(set(types or ()) - _ATTENTION)
    return f"layers of {', '.join(others)}" if others else None


def _has_experts(model: PreTrainedModel) -> bool:
    """Return whether a model has experts, also outside of transformers' experts interface."""
    named = any("Expert" in type(module).__name__ for module in model.modules())
    return named or has_fused_experts(model)


def parameter_counts(model: PreTrainedModel, original: int) -> dict[str, int]:
    """Return `Plan.parameters` of a converted model that had `original` parameters before."""
    report = model.metis_report
    assert isinstance(report, ConversionReport)
    split = [layer for _, layer in metis_layers(model) if layer.weight_form.is_split]
    added = sum(p.numel() for layer in split for p in layer.weight_params()[:-1])
    return {
        "total": count_elements(model),
        "original": original,
        "converted": report.converted_params,
        "split": added + sum(layer.weight_params()[-1].numel() for layer in split),
        "added": added,
    }


def step_costs(
    model: PreTrainedModel, gemms: Mapping[str, float], load: Workload
) -> dict[str, float]:
    """Return FLOPs of one optimizer step by kind, over all processes, and "quantizer_bytes".

    - "gemm": converted layers, 6 per weight and token (`LayerCost`).
    - "other_gemm": output head and layers left out, also 6.
    - "attention": Q K^T and P V, 12 l t s h d for l layers, t tokens in sequences of length s and
      h heads of size d (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B); the causal half is
      not taken off.
    - "recomputation": one more forward pass of the blocks under activation checkpointing.
    - everything else: what the scheme adds.

    Args:
        model: converted.
        gemms: multiplications of a token by module, of the model as it was (`gemm_weights`).
        load: what a step takes.
    """
    passes = load.global_batch // load.device_batch  # over all processes
    t = load.device_tokens
    total, again = LayerCost(), LayerCost()
    blocks = tuple(f"{name}." for name in block_names(model))
    repeated = {name for name in gemms if name.startswith(blocks)}
    for name, layer in metis_layers(model):
        total += layer_cost(layer, t)
        if name in repeated:
            again += forward_cost(layer, t)
            repeated.discard(name)
    again += LayerCost(gemm=2.0 * t * sum(gemms[name] for name in repeated))
    other = 6.0 * t * sum(gemms.values()) - total.gemm
    attention = 3.0 * _attention_flops(model.config, t, load.sequence_length)
    costs = asdict(total) | {"other_gemm": other, "attention": attention, "recomputation": 0.0}
    if load.checkpointing:
        costs["recomputation"] = again.flops + attention / 3
        costs["quantizer_bytes"] += again.quantizer_bytes
    return {name: value * passes for name, value in costs.items()}


def _attention_flops(config: PreTrainedConfig, tokens: int, sequence_length: int) -> float:
    """Return one forward pass; see `step_costs`."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 4.0 * config.num_hidden_layers * tokens * sequence_length * heads * size


def rank_memory(model: PreTrainedModel, load: Workload, *, sharded: bool) -> dict[str, int]:
    """Return bytes on the fullest rank, by kind, at the end of a forward pass.

    With P parameters in n tensors, W processes:
    - "weights", "gradients": fp32, 4P each. FSDP2 shards each tensor along dimension 0 and the
      first rank has ceil(d0 / W) of its d0 rows (torch.distributed.tensor.Shard).
    - "moments": AdamW's exp_avg and exp_avg_sq, 8P sharded like the weights, and one fp32 step
      count for each tensor (torch.optim.AdamW).
    - "scheme_state": buffers of the layers' schemes, whole on every rank in either way.
    - "gradient_buckets": DDP's own copy of the gradients, 4P (gradient_as_bucket_view=False).
    - "gathered": FSDP2's whole weights of two blocks (the running and the prefetched one) and of
      what is not resharded after forward, with the gradients of one block and their flat copy; an
      estimate, in the dtype of communication.
    - "activations": saved for the backward pass, traced; "linear_activations" those inside
      converted layers, "weight_copies" the bf16 casts of dense weights that autocast keeps.
    - "loss_gradient": of the logits, fp32 and its bf16 cast, when the backward pass starts.
    Not counted: temporaries of quantizers, fragmentation, the framework itself.
    """
    memory = state_memory(model, load, sharded=sharded)
    saved = saved_bytes(model, load, sharded=sharded)
    memory |= {
        "linear_activations": saved.linears,
        "activations": saved.others,
        "weight_copies": saved.weight_copies,
    }
    logits = load.device_tokens * model.config.vocab_size
    memory["loss_gradient"] = logits * (FP32 + (BF16 if load.bf16 else 0))
    return memory


def state_memory(model: PreTrainedModel, load: Workload, *, sharded: bool) -> dict[str, int]:
    """Return the kinds of `rank_memory` that do not depend on the batch."""
    world = load.world_size if sharded else 1
    params = list(model.parameters())
    held = sum(_shard(p, world) for p in params)
    memory = {
        "weights": FP32 * held,
        "gradients": FP32 * held,
        "moments": 2 * FP32 * held + FP32 * len(params),
        "scheme_state": sum(
            buffer.numel() * buffer.element_size()
            for _, layer in metis_layers(model)
            for buffer in layer.state_buffers().values()
        ),
    }
    if sharded:
        block = max((count_elements(b) for b in blocks_of(model)), default=0)
        kept = count_elements(model) - sum(count_elements(unit) for unit in resharded_units(model))
        memory["gathered"] = (4 * block + kept) * load.compute_size
    elif load.world_size > 1:
        memory["gradient_buckets"] = FP32 * held
    return memory


def saved_bytes(model: PreTrainedModel, load: Workload, *, sharded: bool) -> SavedBytes:
    """Return what autograd keeps between the forward and the backward pass of one rank.

    Traced on one and on two blocks where all blocks are alike, and continued linearly; else on the
    whole model. Under FSDP2 the gathered weights are bf16, and with them the activations. Under
    activation checkpointing the saved tensors of one block come on top, which its recomputation
    brings to life.
    """

    def trace(part: PreTrainedModel, checkpointing: bool) -> SavedBytes:
        return trace_saved_bytes(
            part,
            (load.device_batch, load.sequence_length),
            autocast=torch.bfloat16 if load.bf16 else None,
            weights=torch.bfloat16 if load.bf16 and sharded else torch.float32,
            checkpointing=checkpointing,
        )

    blocks = list(blocks_of(model))
    if len(blocks) < 3 or len({_signature(block) for block in blocks}) > 1:
        total = trace(model, load.checkpointing)
        if not load.checkpointing:
            return total
        return total + (trace(model, False) - total) * (1 / len(blocks))
    one, two = (trace(_truncated(model, n), load.checkpointing) for n in (1, 2))
    total = one + (two - one) * (len(blocks) - 1)
    if load.checkpointing:
        first, second = (trace(_truncated(model, n), False) for n in (1, 2))
        total += second - first
    return total


def _added_kinds() -> list[str]:
    return [f.name for f in fields(LayerCost) if f.name not in ("gemm", "quantizer_bytes")]


def _shard(param: Tensor, world: int) -> int:
    """Return elements of a parameter on the first of `world` ranks."""
    if param.dim() == 0:
        return 1
    rows = param.shape[0]
    return -(-rows // world) * (param.numel() // rows)


def _signature(block: nn.Module) -> tuple:
    """Return what two blocks must share to save the same tensors."""
    shapes = Counter((key, tuple(p.shape)) for key, p in block.named_parameters())
    schemes = [layer.scheme for _, layer in metis_layers(block)]
    return tuple(sorted(shapes)), tuple(map(repr, schemes))


def _truncated(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a copy with the first `count` blocks."""
    model = copy.deepcopy(model)
    first = next(blocks_of(model))
    stack = next(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and module[0] is first
    )
    blocks = model.get_submodule(stack)
    assert isinstance(blocks, nn.ModuleList)
    model.set_submodule(stack, blocks[:count])
    model.config.num_hidden_layers = count
    return model
