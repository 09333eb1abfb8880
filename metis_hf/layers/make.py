"""Make the quantized layer for an nn.Linear, for transformers' Conv1D, or for a bare weight."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig
from metis_hf.layers.linear import MetisLayer, MetisLinear, QuantLinear
from metis_hf.layers.token_mask import TokenMask
from metis_hf.schemes import build_scheme


def convert_linear(
    module: nn.Linear | Conv1D,
    config: MetisConfig,
    *,
    name: str,
    token_mask: TokenMask | None = None,
) -> MetisLayer:
    """Return the quantized layer for an nn.Linear or Conv1D; it shares bias and dense weight.

    Args:
        module: nn.Linear or Conv1D; a weight on the meta device gives empty factors.
        config: its scheme decides between QuantLinear and MetisLinear.
        name: full name in the model; gives each layer its own noise.
        token_mask: the model's, if any.
    """
    layer = make_layer(
        module.weight,
        module.bias,
        config,
        name=name,
        conv1d=isinstance(module, Conv1D),
        token_mask=token_mask,
    )
    return layer.train(module.training)


def make_layer(
    weight: Tensor,
    bias: Tensor | None,
    config: MetisConfig,
    *,
    name: str,
    conv1d: bool = False,
    token_mask: TokenMask | None = None,
) -> MetisLayer:
    """Return the quantized layer for a weight [o i], or [i o] with `conv1d`."""
    out_features, in_features = weight.shape[::-1] if conv1d else weight.shape
    form = build_scheme(config, in_features, out_features).weight
    layer = (MetisLinear if form.is_split else QuantLinear)(
        weight, bias, config, name=name, conv1d=conv1d
    )
    layer.token_mask = token_mask
    return layer


def as_linear(module: nn.Module) -> nn.Linear | Conv1D:
    """Return the module itself, typed as one of the two kinds that can be converted."""
    assert isinstance(module, nn.Linear | Conv1D), type(module)
    return module


def linear_shape(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """Return (in_features, out_features) of an nn.Linear or Conv1D."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
