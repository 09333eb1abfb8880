"""OsciReset (arXiv 2510.27527): weights that flip between two FP4 values are put onto one.

Late in training a weight near the border of two bins moves little, and its quantized value jumps
each time it crosses. Over a window of steps both paths are measured, |w_t - w_(t-1)| and
|Q(w_t) - Q(w_(t-1))| summed; where their ratio is high the weight is set to Q(w), the centre of its
bin. Optimizer states stay as they are. For layers whose scheme keeps an `Oscillation` state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metis_hf.conversion.convert import metis_layers
from metis_hf.layers.linear import MetisLayer, full_tensor
from metis_hf.schemes.tetrajet2 import Oscillation
from metis_hf.training.refresh import check_engine, reshard, write


def oscillating_layers(model: nn.Module) -> dict[str, MetisLayer]:
    """The layers whose weights are watched, by name."""
    layers = metis_layers(model)
    return {name: m for name, m in layers if isinstance(m.scheme.state, Oscillation)}


@torch.no_grad()
def suppress_oscillation(model: nn.Module, step: int, max_steps: int) -> dict[str, float]:
    """Measures paths and resets oscillating weights; call it after every optimizer step.

    What it measures lies in buffers of the layers, which are saved with the model: a resumed run
    goes on where the saved one was. All processes have to call it together.

    Args:
        model: converted; plain, under DDP, or sharded by FSDP2.
        step: optimizer steps taken so far, the last one included.
        max_steps: of the whole training; the first part of it is left alone.

    Returns:
        layer name -> share of its weights that was reset; empty except at the end of a window.

    Raises:
        NotImplementedError: under DeepSpeed or FSDP1, which train copies of the parameters.
    """
    layers, shares = oscillating_layers(model), {}
    if layers:
        check_engine(model, "OsciReset (scheme tetrajet2)", 'Use scheme "nvfp4" or "nvidia"')
        reshard(model)
    for name, layer in layers.items():
        settings = layer.scheme.state
        assert isinstance(settings, Oscillation)
        phase = step % settings.period
        begin = step - phase  # after the first step at the earliest
        if begin < max(settings.start * max_steps, 1) or phase > settings.window:
            continue
        weight, quantized = _weight(layer)
        if phase == 0:
            _begin(layer, weight)
        else:
            _follow(layer, weight, quantized)
        if phase == settings.window:
            shares[name] = _reset(layer, weight, quantized, settings.threshold)
    return shares


def oscillation_ratio(layer: MetisLayer) -> Tensor:
    """Path of the quantized weight over that of the weight, [o i]; 0 where neither moved."""
    state = layer.state_buffers()
    ratio = state["quantized_path"] / state["weight_path"]
    return ratio.masked_fill_(state["weight_path"] == 0, 0.0)


def _weight(layer: MetisLayer) -> tuple[Tensor, Tensor]:
    """The weight [o i] and its quantized copy, in fp32, whole."""
    weight = full_tensor(layer.weight_params()[-1]).float()
    return weight, _quantized(layer, weight)


def _quantized(layer: MetisLayer, weight: Tensor) -> Tensor:
    operand = layer.eval_scheme.fprop_weight  # to nearest, as in training
    return operand(weight, dim=-1, key=layer.key, dtype=torch.float32)[0]


def _begin(layer: MetisLayer, weight: Tensor) -> None:
    state = layer.state_buffers()
    state["previous_weight"].copy_(weight)
    for name in ("weight_path", "quantized_path"):
        state[name].zero_()


def _follow(layer: MetisLayer, weight: Tensor, quantized: Tensor) -> None:
    state = layer.state_buffers()
    previous = state["previous_weight"]
    state["weight_path"] += (weight - previous).abs()
    state["quantized_path"] += (quantized - _quantized(layer, previous)).abs()
    previous.copy_(weight)


def _reset(layer: MetisLayer, weight: Tensor, quantized: Tensor, threshold: float) -> float:
    oscillates = oscillation_ratio(layer) >= threshold
    value = torch.where(oscillates, quantized, weight)
    parameter: Tensor = layer.weight  # type: ignore[assignment]
    write(parameter, (value.T if layer.conv1d else value).to(parameter.dtype))
    return oscillates.float().mean().item()
