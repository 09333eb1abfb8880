"""Converted models that from_pretrained distributes over processes (`DistributedConfig`).

transformers shards a model after it builds the model and before it loads the weights. The model is
therefore converted before sharding, even if the checkpoint is dense; layers that cannot be sharded
are refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.report import LayerReport
from metis_hf.layers.parallelism import EXPERT, FSDP2_INSTEAD, TENSOR, planned
from metis_hf.layers.tensor_parallel import STYLES, WHOLE, Shards, obstacle
from metis_hf.operands.weight_forms import DenseWeight

_NOT_SHARED = "and GEMMs on FP4 units cannot share scales across processes"


def check_dense_checkpoint(model: nn.Module) -> None:
    """Refuse a converted, still empty model if a dense checkpoint cannot fill its layers.

    Raises:
        NotImplementedError: a layer stores different tensors than the layer it was converted from.
    """
    for name, layer in metis_layers(model):
        if not isinstance(layer.weight_form, DenseWeight) or layer.scheme.state is not None:
            raise _unfit(model, f"{name} stores tensors that the dense checkpoint lacks")
    report: Any = model.metis_report
    fused = next((layer.name for layer in report.layers if layer.kind == "expert"), None)
    if fused is not None:
        raise _unfit(model, f"{fused} is a slice of a fused parameter in the dense checkpoint")


def _unfit(model: nn.Module, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{_sizes(model)} is not supported while a dense checkpoint is converted: weights are "
        f"loaded in parts, and {why}. Convert the checkpoint in one process, save it with "
        "save_pretrained, and load the result"
    )


def _sizes(model: nn.Module) -> str:
    return ", ".join(f"{name}={size}" for name, size in planned(model).items())


def cut_layers(model: nn.Module) -> None:
    """Tell converted layers, still without weights, how transformers will shard them.

    Raises:
        NotImplementedError: sharding would change the results of a layer, or the model combines
            tensor parallelism with another kind.
    """
    sizes = planned(model)
    size = sizes.get("tp_size", 1)
    if size == 1:
        return
    if len(sizes) > 1:
        raise NotImplementedError(
            f"{_sizes(model)} is not supported for a converted model: tensor parallelism has been "
            "tested only by itself. Keep only one of them"
        )
    shards = shards_of(model, size, _tensor_plan(model))
    report: Any = model.metis_report
    model.metis_report = replace(  # type: ignore[assignment]
        report, layers=tuple(_as_cut(row, shards[row.name]) for row in report.layers)
    )
    for name, layer in metis_layers(model):
        layer.shards = shards[name]
        # Makes transformers hand the layer its shard of a weight as a plain tensor.
        layer._hf_quantized_needs_local_tp = True  # type: ignore[assignment]


def _as_cut(row: LayerReport, shards: Shards) -> LayerReport:
    """Return a layer's report once the layer is sharded: a sharded layer is emulated."""
    if not (row.native and shards.cut):
        return row
    return replace(row, native=False, emulated=f"tensor parallelism shards them, {_NOT_SHARED}")


def shards_of(model: nn.Module, size: int, plan: dict[str, str]) -> dict[str, Shards]:
    """Return the `Shards` of each converted layer, by name.

    Args:
        model: converted.
        size: number of processes.
        plan: transformers' plan: name, with `*` for the layer number -> style.

    Raises:
        NotImplementedError: sharding would change the results of a layer.
    """
    report: Any = model.metis_report
    if any(layer.kind == "expert" for layer in report.layers):
        asked = f"tp_size={size} is not supported for converted experts"
        raise NotImplementedError(f"{asked}: {EXPERT}. {FSDP2_INSTEAD}")
    found = {}
    for name, layer in metis_layers(model):
        style = plan.get(replace_layer_number_by_wildcard(name))
        if style is not None and style not in STYLES:
            raise _refusal(size, name, f"its style {style!r} is not one of {', '.join(STYLES)}")
        shards = Shards(STYLES[style] if style else WHOLE, size)
        reason = obstacle(layer.scheme, shards, (layer.out_features, layer.in_features))
        if shards.cut and reason is None and layer.config.backend == "native":
            reason = f'it has backend="native", {_NOT_SHARED}'
        if shards.cut and reason is None and layer.conv1d:
            reason = "a Conv1D stores its weight transposed, but plans shard it as if it were not"
        if reason is not None:
            raise _refusal(size, name, reason)
        found[name] = shards
    return found


def _refusal(size: int, name: str, reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"tp_size={size} cannot shard {name}, because {reason}: {TENSOR}. {FSDP2_INSTEAD}, load "
        f"it with DistributedConfig(fsdp_size={size}), or choose a scheme such as "
        '"nvfp4" or "nvidia"'
    )


def _tensor_plan(model: Any) -> dict[str, str]:
    """Return the plan that transformers will apply: the model's, updated with the user's."""
    changes = model.config.distributed_config.tp_plan
    if not isinstance(changes, dict):
        return model.tp_plan
    return model.tp_plan | changes if changes else {}


def join_layers(model: Any) -> None:
    """Set the process group over which sharded layers share their scales."""
    for _, layer in metis_layers(model):
        if layer.shards is not None:
            group = model._mesh_manager.get_mesh("tp").get_group()
            layer.shards = replace(layer.shards, group=group)
