"""Calls the hooks of schemes' states between optimizer steps, in one process or many.

The hooks are in `schemes.states`; this module gives them each layer as a `StatefulLayer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metis_hf.conversion.convert import metis_layers
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.sharding import full_tensor
from metis_hf.schemes.noise_keys import several_processes
from metis_hf.schemes.states import LayerState
from metis_hf.training.refresh import check_engine, reshard, write


@torch.no_grad()
def after_step(model: nn.Module, step: int, max_steps: int) -> dict[str, dict[str, float]]:
    """Update the states of schemes after an optimizer step; MetisCallback calls this.

    All processes must call it together. Without this call each process (under DDP: the first) uses
    only statistics of its own batches, and oscillating weights are not reset.

    Args:
        model: converted; plain, under DDP, or sharded by FSDP2.
        step: optimizer steps taken so far.
        max_steps: of the whole training.

    Returns:
        Figures for the log: name -> layer name -> value.

    Raises:
        NotImplementedError: a state writes to weights, under DeepSpeed or FSDP1, which train copies
            of the parameters.
    """
    groups = _layers_by_state(model)
    if several_processes():
        for state, layers in groups.items():
            state.synchronize(layers)
    check_states(model)
    if any(state.writes_weights for state in groups):
        reshard(model)
    figures: dict[str, dict[str, float]] = {}
    for state, layers in groups.items():
        for name, values in state.after_step(layers, step, max_steps).items():
            figures.setdefault(name, {}).update(values)
    return figures


def check_states(model: nn.Module) -> None:
    """Refuse engines that would overwrite the changes of states to weights.

    Raises:
        NotImplementedError: a state writes to weights, under DeepSpeed or FSDP1.
    """
    for _, layer in metis_layers(model):
        state = layer.scheme.state
        if state is not None and state.writes_weights:
            asked = f"{state.writes_weights} (scheme {layer.config.scheme})"
            advice = (
                'Use a scheme that leaves weights to the optimizer, such as "nvfp4" or "nvidia"'
            )
            check_engine(model, asked, advice)
            return


def _layers_by_state(model: nn.Module) -> dict[LayerState, Mapping[str, _Layer]]:
    """Return the layers with a state, grouped by equal states, in the order of the model."""
    groups: dict[LayerState, dict[str, _Layer]] = {}
    for name, layer in metis_layers(model):
        if layer.scheme.state is not None:
            groups.setdefault(layer.scheme.state, {})[name] = _Layer(layer)
    return {**groups}


@dataclass(frozen=True)
class _Layer:
    """A `StatefulLayer`."""

    layer: MetisLayer

    @property
    def buffers(self) -> dict[str, Tensor]:
        return self.layer.state_buffers()

    @property
    def is_split(self) -> bool:
        return self.layer.weight_form.is_split

    def weight(self) -> Tensor:
        return full_tensor(self.layer.weight_params()[-1]).float()

    def quantize(self, weight: Tensor) -> Tensor:
        operand = self.layer.eval_scheme.fprop_weight  # to nearest, as in training
        return operand(weight, dim=-1, key=self.layer.key, dtype=torch.float32)[0]

    def write(self, weight: Tensor) -> None:
        parameter: Tensor = getattr(self.layer, self.layer.weight_form.names[-1])
        write(parameter, (weight.T if self.layer.conv1d else weight).to(parameter.dtype))
