"""Checks before the first step of a run: optimizer, precision, dtypes of FSDP2 units."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FSDPModule

from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes.subspaces import KeptSubspaces
from metis_hf.shared.devices import lacks


def check_device(device: torch.device) -> None:
    """Refuse a device that cannot compute schemes."""
    if reason := lacks(device):
        raise NotImplementedError(
            f"Trainer runs on {device.type}, and no scheme can be computed there: {reason}. Train "
            "on the CPU: TrainingArguments(use_cpu=True), or --use_cpu"
        )


def check_compilation(layers: dict[str, MetisLayer]) -> None:
    """Refuse kept subspaces, which a compiled step cannot track; for `torch_compile=True`."""
    for name, layer in layers.items():
        if isinstance(layer.scheme.state, KeptSubspaces):
            raise NotImplementedError(
                "torch_compile=True does not work with "
                f"subspace_interval={layer.config.subspace_interval} ({name}): a compiled step "
                "cannot ask the host which subspaces are kept, and would compute all of them. "
                "Leave one of the two out"
            )


def check_optimizer(layers: dict[str, MetisLayer], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not own all trainable parameters of converted layers."""
    if type(optimizer).__name__ == "LayerWiseDummyOptimizer":
        raise NotImplementedError(
            "this optimizer steps layer by layer inside the backward pass (optim=..._layerwise), "
            "but quantized weights are kept until a step of the whole model: use the same "
            "optimizer without _layerwise"
        )
    groups = [group["params"] for group in optimizer.param_groups]
    # DeepSpeed's optimizers step flat copies and keep the model's parameters in these lists.
    inner = getattr(optimizer, "optimizer", optimizer)
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(inner, name, groups)
    owned = {id(param) for group in groups for param in group}
    for name, layer in layers.items():
        for key, param in layer.named_parameters(recurse=False):
            if param.requires_grad and id(param) not in owned:
                raise ValueError(
                    f"the optimizer does not own {name}.{key}, which has requires_grad=True. If "
                    "the model was converted after the optimizer was built, call get_metis_model "
                    "first (or let Trainer build the optimizer). If the optimizer should train "
                    "only part of the model, freeze the rest: parameter.requires_grad_(False)"
                )


def check_precision() -> None:
    """Refuse a device that cannot compute schemes, and accelerate's FP8.

    accelerate's FP8 replaces layers with its own, which use other scales.
    """
    if not AcceleratorState._shared_state:
        return
    check_device(AcceleratorState().device)
    if AcceleratorState().mixed_precision == "fp8":
        raise NotImplementedError(
            "accelerate runs with mixed_precision=fp8, which quantizes linear layers itself, but "
            "the layers of this model are converted and quantize as their scheme says. Choose "
            "bf16 or no (accelerate config, or --mixed_precision bf16), or train the plain model"
        )


def check_dtypes(model: nn.Module) -> None:
    """Refuse several dtypes in one FSDP2 unit, whose parameters are gathered together."""
    units: dict[int, tuple[str, str, torch.dtype]] = {}  # parameter -> unit, name, dtype
    for unit, module in model.named_modules():
        params = module.named_parameters(unit)
        if isinstance(module, FSDPModule):  # inner units come later and own their parameters
            for name, param in params:
                if param.requires_grad:
                    units[id(param)] = unit or type(model).__name__, name, param.dtype
    dtypes: dict[str, dict[torch.dtype, str]] = {}
    for unit, name, dtype in units.values():
        dtypes.setdefault(unit, {}).setdefault(dtype, name)
    for unit, found in dtypes.items():
        if len(found) > 1:
            shown = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
            raise ValueError(
                f"FSDP2 needs one dtype for all trainable parameters of {unit}, but {shown}. Load "
                "the model with dtype=torch.float32 (or call model.float()) before the Trainer is "
                "built, and train with bf16=True to run the GEMMs in BF16"
            )
