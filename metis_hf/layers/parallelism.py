"""Checks that refuse kinds of parallelism which quantized layers do not support.

DDP, FSDP2 and ZeRO give every layer whole weights and whole sequences. Tensor, expert, pipeline and
context parallelism give it parts; the messages say what would go wrong. `tensor_parallel` supports
the tensor parallelism of transformers.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState
from torch import Tensor, nn

FSDP2_INSTEAD = "Shard the model with FSDP2 instead (fsdp_version: 2)"
TENSOR = (
    "tensor parallelism gives each process a part of every weight and, for some layers, a part of "
    "the inputs. Tensor scales, blocks and subspaces would be computed per part"
)
EXPERT = (
    "expert parallelism gives each process some of the experts by slicing one 3-D parameter, but "
    "converted experts are separate layers: every process would keep all of them and train them "
    "on different tokens"
)
PIPELINE = "pipeline parallelism of transformers only runs the forward pass and cannot train"
SEQUENCE = (
    "splits sequences over processes. Each process would quantize its own part: tensor scales, "
    "blocks along tokens and subspaces would be computed per part, in a token order that load "
    "balancing chooses"
)


def planned(model: nn.Module) -> dict[str, int]:
    """Return the sizes above 1 of the `DistributedConfig` that a model is loaded with.

    Returns:
        "tp_size", "ep_size", "pp_size", "fsdp_size" or "dp_replicate_size" -> processes.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if isinstance(config, dict):  # as it is in a config.json
        config = None
    names = ("tp_size", "ep_size", "pp_size", "fsdp_size", "dp_replicate_size")
    sizes = {name: getattr(config, name, None) or 1 for name in names}
    return {name: size for name, size in sizes.items() if size > 1}


def check_plan(model: nn.Module) -> None:
    """Refuse expert and pipeline parallelism before anything is loaded.

    Raises:
        NotImplementedError: the model's config asks for one of them.
    """
    sizes = planned(model)
    for name, reason in (("ep_size", EXPERT), ("pp_size", PIPELINE)):
        if name in sizes:
            raise NotImplementedError(
                f"{name}={sizes[name]} is not supported for a converted model: {reason}. "
                f"{FSDP2_INSTEAD}, or load it with DistributedConfig(fsdp_size=...)"
            )


def check_packed(model: nn.Module, where: str) -> None:
    """Refuse to shard a model with packed weights while loading it from the checkpoint `where`.

    Raises:
        NotImplementedError: `distributed_config` asks for several processes.
    """
    sizes = ", ".join(f"{name}={size}" for name, size in planned(model).items())
    if sizes:
        raise NotImplementedError(
            f"{where} cannot be loaded with DistributedConfig({sizes}): packed weights are frozen "
            "buffers of 4.5 bits per element, and every process holds all of them. Load it "
            "without distributed_config, and train adapters with DDP (ddp_broadcast_buffers=False)"
        )


def check_whole(model: nn.Module) -> None:
    """Refuse to convert a model whose parameters are already sharded over processes.

    Raises:
        NotImplementedError: parameters are DTensors, or transformers has hooked its own
            communication into modules.
    """
    name = next((n for n, param in model.named_parameters() if is_spread(param)), None)
    if name is None:
        name = next((n for n, module in model.named_modules() if is_hooked(module)), None)
    if name is not None:
        sizes = ", ".join(f"{key}={size}" for key, size in planned(model).items())
        raise NotImplementedError(
            f"{name} is already sharded over processes{f' ({sizes})' * bool(sizes)}, but "
            f"conversion needs whole weights: {TENSOR}. Convert the whole model first, then shard "
            "it with FSDP2"
        )


def is_spread(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "placements")


def is_sharded(param: nn.Parameter) -> bool:
    """Return whether FSDP2 (a DTensor) or ZeRO-3 shards a parameter."""
    return is_spread(param) or hasattr(param, "ds_id")


def is_hooked(module: nn.Module) -> bool:
    """Return whether transformers has hooked tensor or expert parallelism into a module."""
    return bool(getattr(module, "_is_hooked", False))


def check_accelerate() -> None:
    """Refuse context and sequence parallelism of accelerate's `ParallelismConfig`.

    accelerate itself refuses tensor parallelism unless from_pretrained has sharded the model.

    Raises:
        NotImplementedError: context or sequence parallelism is on.
    """
    # Not AcceleratorState(), which would create a state if there is none.
    config: Any = AcceleratorState._shared_state.get("parallelism_config")
    if config is None:
        return
    for name, kind in (("cp_size", "context"), ("sp_size", "sequence")):
        size = getattr(config, name, 1)  # not every version of accelerate has both
        if size > 1:
            raise NotImplementedError(
                f"ParallelismConfig({name}={size}) is not supported: {kind} parallelism "
                f"{SEQUENCE}. {FSDP2_INSTEAD}, with activation checkpointing if sequences are too "
                "long for the memory"
            )
