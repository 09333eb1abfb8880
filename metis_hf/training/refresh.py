"""Recomputes the decomposition of split weights between optimizer steps, in one or many processes.

The represented weight does not change. u, s, vh and the residual are written in place, so that the
optimizer, DDP's buckets and FSDP2's shards keep their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.utils import logging

from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.refusals import DEEPSPEED_MARKS
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.parallelism import is_spread
from metis_hf.layers.sharding import full_tensor
from metis_hf.operands import SplitWeight
from metis_hf.schemes.noise_keys import several_processes

logger = logging.get_logger(__name__)


@torch.no_grad()
def refresh(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """Recompute the decomposition of the split weights that train; of all if none trains.

    All processes must call it together, between optimizer steps, with no gradient accumulated.

    The residual's gradient is dL/dW itself, so its moments stay valid. The moments of u, s and vh
    belong to the old factors and are reset in place, with the step count: the optimizer's state
    keeps its keys, and Adam's bias correction starts from zero.

    Args:
        model: converted; plain, under DDP, or sharded by FSDP2 (`fully_shard`).
        optimizer: of the model.

    Returns:
        layer name -> relative change of the represented weight, from floating-point rounding.

    Raises:
        ValueError: no weight is stored split; see `check_split`.
        NotImplementedError: under DeepSpeed or FSDP1 (`check_engine`), or the optimizer has state
            of an unknown kind; nothing changes.
    """
    check_split(model, "refresh()")
    check_engine(model, "refresh()")
    if optimizer is not None:
        check_moments(model, optimizer)
    reshard(model)
    drifts = {name: refresh_layer(layer) for name, layer in refreshed(model).items()}
    if optimizer is not None:
        for param in _factors(model):
            _clear_moments(param, optimizer)
    return drifts


# State that optimizers compute from past gradients (torch's, transformers' Adafactor, Muon) -> its
# initial value.
_BEFORE = dict.fromkeys(
    ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
     "grad_avg", "acc_delta", "sum", "exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var",
     "variance", "RMS"), 0,
) | {"mu_product": 1}  # fmt: skip


def _factors(model: nn.Module) -> list[Tensor]:
    """Return u, s and vh of every refreshed weight."""
    return [param for layer in refreshed(model).values() for param in layer.weight_params()[:-1]]


def interval_of(model: nn.Module, asked: int | None) -> int:
    """Return the number of steps between refreshes in a run, checked at its start; 0: never.

    Args:
        model: converted.
        asked: by the user; None: the model config's interval, or 0 if all split weights are frozen.

    Raises:
        ValueError: no weight is stored split, or all split weights are frozen and `asked` is not 0.
        NotImplementedError: as in `check_engine`.
    """
    every = asked
    if every is None:
        every = next(layer for _, layer in metis_layers(model)).config.refresh_interval
    split = _split(model).values()
    if every and split and not any(map(_trains, split)):
        if asked is None:
            logger.info(
                "ignoring refresh_interval of the config, because all split weights are frozen"
            )
            return 0
        raise ValueError(
            f"refresh_interval={asked} decomposes split weights again as they train, but all split "
            "weights of this model are frozen, as they are under adapters. Leave it out"
        )
    if every:
        check_split(model, f"refresh_interval={every}")
        check_engine(model, f"refresh_interval={every}")
    return every or 0


def refreshed(model: nn.Module) -> dict[str, MetisLayer]:
    """Return the layers to refresh, by name: those whose split weight trains.

    Other split weights, frozen under adapters, are not in the run's checkpoints and must not
    change. If no split weight trains, as after adapters were merged, return all.
    """
    split = _split(model)
    return {name: layer for name, layer in split.items() if _trains(layer)} or split


def _split(model: nn.Module) -> dict[str, MetisLayer]:
    return {name: layer for name, layer in metis_layers(model) if layer.weight_form.is_split}


def _trains(layer: MetisLayer) -> bool:
    return any(param.requires_grad for param in layer.weight_params())


def check_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizer state that cannot be reset, such as an average of weights."""
    kept = {name for param in _factors(model) for name in optimizer.state.get(param) or {}}
    if unknown := sorted(kept - _BEFORE.keys()):
        own = getattr(optimizer, "optimizer", optimizer)  # wrapped by accelerate
        raise NotImplementedError(
            f"cannot refresh with {type(own).__name__}, whose state has {', '.join(unknown)}: "
            "their values for new factors are unknown. Train without refresh "
            '(refresh_interval=0), or with an optimizer of torch, for example optim="adamw_torch"'
        )


def _clear_moments(param: Tensor, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state.get(param) or {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            value.fill_(_BEFORE[name])
        elif value is not None:
            state[name] = _BEFORE[name]


def reshard(model: nn.Module) -> None:
    """Reshard FSDP2's units, so that writes reach their parameters.

    After a forward pass without backward some units stay unsharded. Their visible parameters are
    then copies, and writes to the copies are lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_split(model: nn.Module, asked: str) -> None:
    """Refuse models without split weights; `asked` names the option or call that refreshes.

    Raises:
        ValueError: no layer stores u, s, vh and residual.
    """
    if not _split(model):
        schemes = sorted({layer.config.scheme for _, layer in metis_layers(model)})
        raise ValueError(
            f"{asked} decomposes stored u, s, vh and weight_residual again, and no layer of this "
            f"model has them (scheme {', '.join(map(repr, schemes)) or 'none'} stores one matrix). "
            "Leave it out, or convert with MetisConfig(split_weight=True)"
        )


def check_engine(model: nn.Module, asked: str, advice: str = "Set refresh_interval=0") -> None:
    """Refuse engines that train copies of the parameters and would overwrite in-place changes.

    The message names the feature that writes to parameters (`asked`) and the remedy (`advice`).

    Raises:
        NotImplementedError: the model runs under DeepSpeed or FSDP1.
    """
    # Not AcceleratorState(), which would create a state if there is none.
    kind = AcceleratorState._shared_state.get("distributed_type")
    marked = any(hasattr(param, mark) for param in model.parameters() for mark in DEEPSPEED_MARKS)
    engine = None
    if kind is DistributedType.DEEPSPEED or marked:
        engine = "DeepSpeed, whose fp32 master weights would overwrite refreshed weights"
    elif any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        engine = "FSDP1, which flattens parameters; FSDP2 (fsdp_version: 2) supports it"
    if engine is not None:
        raise NotImplementedError(f"{asked} does not work under {engine}. {advice}")


@torch.no_grad()
def refresh_layer(layer: MetisLayer) -> float:
    """Recompute the decomposition of one weight in place; return its relative drift."""
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
    """Copy a full value, equal in all processes, to a parameter that FSDP2 may have sharded."""
    if is_spread(param):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(param, DTensor)
        value = distribute_tensor(value, param.device_mesh, param.placements)
    param.copy_(value)
