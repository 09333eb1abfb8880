"""Decomposing split weights again between optimizer steps, in one process or many.

The represented weight stays what it is; u, s, vh and the residual are written in place, so that the
optimizer, DDP's buckets and FSDP2's shards keep their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.refusals import DEEPSPEED_MARKS
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.parallelism import is_spread
from metis_hf.layers.sharding import full_tensor, several_processes
from metis_hf.operands import SplitWeight


@torch.no_grad()
def refresh(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """Decompose every split weight of a model again. All processes have to call it together.

    The residual's gradient is dL/dW itself, so its moments stay valid. Those of u, s and vh belong
    to the old factors and start again in place, the step count with them: the optimizer's state
    keeps its keys, and Adam's bias correction starts from zero. Call it between optimizer steps,
    when no gradient is accumulated.

    Args:
        model: converted; plain, under DDP, or sharded by FSDP2 (`fully_shard`).
        optimizer: the one that trains it.

    Returns:
        layer name -> how far the represented weight moved (fp rounding), relative to its norm.

    Raises:
        ValueError: no weight is stored split; see `check_split`.
        NotImplementedError: under DeepSpeed or FSDP1 (`check_engine`), or an optimizer whose state
            is not of a known kind; nothing changes.
    """
    check_split(model, "refresh()")
    check_engine(model, "refresh()")
    if optimizer is not None:
        check_moments(model, optimizer)
    reshard(model)
    drifts = {}
    for name, layer in metis_layers(model):
        if _is_refreshed(layer):
            drifts[name] = refresh_layer(layer)
    if optimizer is not None:
        for param in _factors(model):
            _clear_moments(param, optimizer)
    return drifts


# What optimizers keep of past gradients, and the value that it has before the first: torch's,
# transformers' Adafactor and Muon.
_BEFORE = dict.fromkeys(
    ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
     "grad_avg", "acc_delta", "sum", "exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var",
     "variance", "RMS"), 0,
) | {"mu_product": 1}  # fmt: skip


def _factors(model: nn.Module) -> list[Tensor]:
    """Return u, s and vh of every split weight."""
    split = [layer for _, layer in metis_layers(model) if _is_refreshed(layer)]
    return [param for layer in split for param in layer.weight_params()[:-1]]


def all_are_frozen(model: nn.Module) -> bool:
    """Return whether a model has split weights, none of which trains."""
    layers = [layer for _, layer in metis_layers(model)]
    split = any(layer.weight_form.is_split for layer in layers)
    return split and not any(map(_is_refreshed, layers))


def _is_refreshed(layer: MetisLayer) -> bool:
    """Return whether a layer is decomposed again: one that is split, and whose weight trains.

    A frozen one, as under adapters, is in no checkpoint of theirs, and stays what it was.
    """
    params = layer.weight_params()
    return layer.weight_form.is_split and any(param.requires_grad for param in params)


def check_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a state that is more than what gradients left behind, as an average of weights is."""
    kept = {name for param in _factors(model) for name in optimizer.state.get(param) or {}}
    if unknown := sorted(kept - _BEFORE.keys()):
        own = getattr(optimizer, "optimizer", optimizer)  # under accelerate's
        raise NotImplementedError(
            f"refresh with {type(own).__name__}, whose state has {', '.join(unknown)}: it is "
            "not known what that is for new factors. Train without refresh (refresh_interval=0), "
            'or with an optimizer of torch, as optim="adamw_torch"'
        )


def _clear_moments(param: Tensor, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state.get(param) or {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            value.fill_(_BEFORE[name])
        elif value is not None:
            state[name] = _BEFORE[name]


def reshard(model: nn.Module) -> None:
    """Make FSDP2's units show their own parameters, for writing.

    After a forward pass without backward some units stay whole: what they then show as parameters
    are copies, and what is written to those is lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_split(model: nn.Module, asked: str) -> None:
    """Refuse models that have nothing to decompose again.

    Args:
        model: converted.
        asked: what would refresh, for the message.

    Raises:
        ValueError: no layer stores u, s, vh and residual, or all are frozen.
    """
    layers = [layer for _, layer in metis_layers(model)]
    if not any(layer.weight_form.is_split for layer in layers):
        schemes = sorted({layer.config.scheme for layer in layers})
        raise ValueError(
            f"{asked} decomposes stored u, s, vh and weight_residual again, and no layer of this "
            f"model has them (scheme {', '.join(map(repr, schemes)) or 'none'} stores one matrix). "
            "Leave it out, or convert with MetisConfig(split_weight=True)"
        )
    if all_are_frozen(model):
        raise ValueError(
            f"{asked} decomposes weights again as they train, and all split weights of this model "
            "are frozen, as under adapters. Leave it out (refresh_interval=0)"
        )


def check_engine(model: nn.Module, asked: str, advice: str = "Set refresh_interval=0") -> None:
    """Refuse engines that train copies of the parameters, which would undo what is written.

    Args:
        model: as the engine prepared it.
        asked: what writes to parameters, for the message.
        advice: what to do instead, for the message.

    Raises:
        NotImplementedError: the model runs under DeepSpeed or FSDP1.
    """
    engine = None
    if is_deepspeed(model):
        engine = "DeepSpeed, whose fp32 master weights would overwrite refreshed ones"
    elif any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        engine = "FSDP1, which flattens parameters; FSDP2 (fsdp_version: 2) supports it"
    if engine is not None:
        raise NotImplementedError(f"{asked} does not work under {engine}. {advice}")


def is_deepspeed(model: nn.Module) -> bool:
    """Return whether DeepSpeed trains the model, by accelerate's state or its parameters' marks."""
    # The shared dictionary, not AcceleratorState(): that would set up a state where none is.
    engine = AcceleratorState._shared_state.get("distributed_type")
    return engine is DistributedType.DEEPSPEED or any(
        hasattr(param, mark) for param in model.parameters() for mark in DEEPSPEED_MARKS
    )


@torch.no_grad()
def refresh_layer(layer: MetisLayer) -> float:
    """Decompose one weight again, in place; return its relative drift."""
    params = [full_tensor(param) for param in layer.weight_params()]
    form = layer.weight_form
    assert isinstance(form, SplitWeight)
    before = form.dense(_in_fp32_or_more(params)).float()
    values = [_agreed(factor) for factor in form.stored(before, layer.key, params[-1].dtype)]
    for param, value in zip(layer.weight_params(), values):
        write(param, value)
    after = form.dense(_in_fp32_or_more(values)).float()
    drift = torch.linalg.vector_norm(after - before)
    return (drift / torch.linalg.vector_norm(before).clamp_min(1e-30)).item()


def _in_fp32_or_more(params: Sequence[Tensor]) -> list[Tensor]:
    return [p if p.dtype is torch.float64 else p.float() for p in params]


def _agreed(value: Tensor) -> Tensor:
    """Broadcast the first process's value: an SVD may differ in signs between machines."""
    value = value.contiguous()
    if several_processes():
        dist.broadcast(value, src=0)
    return value


def write(param: Tensor, value: Tensor) -> None:
    """Give a parameter, perhaps sharded by FSDP2, a new value (whole, the same everywhere)."""
    if is_spread(param):  # sharded by FSDP2
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(param, DTensor)
        value = distribute_tensor(value, param.device_mesh, param.placements)
    param.copy_(value)
