"""Names of layers, as models give them."""

from __future__ import annotations


def group_of(layer: str) -> str:
    """Return the last part of a layer's name that is no index: q_proj, down_proj, c_attn, ...

    A name of indices alone, as in a torch.nn.Sequential, is returned whole.
    """
    name = layer.removesuffix(".base_layer")  # which PEFT adds
    return next((part for part in reversed(name.split(".")) if not part.isdigit()), name)
