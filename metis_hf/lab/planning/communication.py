"""The bytes that processes send one another in one optimizer step, under DDP, FSDP2 and TP."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.distributed import shards_of
from metis_hf.lab.planning.workload import DDP, FP32, FSDP2, Workload
from metis_hf.layers.tensor_parallel import shared_numbers

_GATHERED = ("colwise_gather_output", "colwise_rep")  # every process gets the whole output


def communication(model: PreTrainedModel, load: Workload) -> dict[str, dict[str, float]]:
    """Return bytes that one rank sends in one optimizer step.

    Ring algorithms (Thakur, Rabenseifner, Gropp 2005): all-gather and reduce-scatter send (W-1)/W
    of the whole, all-reduce twice that. DDP all-reduces fp32 gradients once. FSDP2, as accelerate
    sets it up, communicates in the autocast dtype at every forward pass: blocks (and an embedding
    of its own) are gathered for forward and for backward, the rest once; gradients are reduced each
    time (`sync_each_batch`; without it every rank would hold whole gradients).
    """
    share = _share(load)
    params = count_elements(model)
    twice = sum(count_elements(unit) for unit in resharded_units(model))
    size = load.compute_size
    return {
        DDP: {"all_reduce": 2 * share * params * FP32},
        FSDP2: {
            "all_gather": share * (params + twice) * size * load.accumulation,
            "reduce_scatter": share * params * size * load.accumulation,
        },
    }


def tensor_parallel(model: PreTrainedModel, load: Workload) -> dict[str, float]:
    """Return the same under transformers' tensor parallelism over all ranks, which see one batch.

    A layer cut by inputs all-reduces its output, one cut by outputs the gradient of its input (fp32
    as norms return it), the embedding its output; a head that gathers sends logits. Activation
    checkpointing repeats the outputs but for the last of each block. Layers that share scales
    all-reduce some numbers in each pass (`layers.tensor_parallel.shared_numbers`). Norms of
    gradients are not counted.

    Args:
        model: converted, of parameters on any device.
        load: with `world_size` ranks that cut every layer.

    Raises:
        NotImplementedError: the model has no plan, or a layer cannot be cut; the message says why.
    """
    plan = model.tp_plan
    if not plan:
        raise NotImplementedError(f"{type(model).__name__} has no tp_plan")
    shards = shards_of(model, load.world_size, plan)
    outputs, reduced, gathered = {}, 0, 0  # elements for each token, but for `reduced`: bytes
    for name, module in model.named_modules():
        style = plan.get(replace_layer_number_by_wildcard(name))
        if style == "rowwise":
            outputs[name] = module.out_features
        elif style in _GATHERED:
            reduced += module.in_features * FP32
            gathered += module.out_features
        elif style == "colwise":
            reduced += module.in_features * FP32
        elif style == "embedding_rowwise":
            reduced += module.embedding_dim * FP32
        elif style is not None:
            raise NotImplementedError(f"{name} is cut in the style {style!r}, which is not planned")
    reduced += sum(outputs.values()) * load.compute_size
    if load.checkpointing:
        reduced += _repeated(model, outputs) * load.compute_size
    passes = [shared_numbers(layer.scheme, shards[name]) for name, layer in metis_layers(model)]
    numbers = sum(n * (1 + load.checkpointing) + m for n, m in passes)
    steps = load.global_batch // load.device_batch
    share, tokens = _share(load), load.tokens_per_step
    return {
        "outputs_all_reduce": 2 * share * reduced * tokens,
        "logits_all_gather": share * gathered * load.compute_size * tokens,
        "scales_all_reduce": 2 * share * numbers * FP32 * steps,
    }


def _repeated(model: PreTrainedModel, outputs: dict[str, int]) -> int:
    """Return elements a token that checkpointed blocks reduce again: all outputs but the last."""
    total = 0
    for block in block_names(model):
        inside = [size for name, size in outputs.items() if name.startswith(f"{block}.")]
        total += sum(inside[:-1])
    return total


def blocks_of(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Return the transformer blocks: what FSDP wraps by default."""
    names = set(model._no_split_modules or ())
    return (module for module in model.modules() if type(module).__name__ in names)


def block_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the transformer blocks."""
    blocks = {id(block) for block in blocks_of(model)}
    return [name for name, module in model.named_modules() if id(module) in blocks]


def resharded_units(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Return what accelerate reshards after forward: blocks, and an embedding that is not tied."""
    yield from blocks_of(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        yield embedding


def count_elements(module: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(p.numel() for p in module.parameters())


def _share(load: Workload) -> float:
    return (load.world_size - 1) / load.world_size
