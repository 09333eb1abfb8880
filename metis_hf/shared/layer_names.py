"""Names of layers in a model."""

from __future__ import annotations


def group_of(layer: str) -> str:
    """Return the last part of a layer's name that is not an index: q_proj, down_proj, c_attn, ...

    A name of indices only, as in a torch.nn.Sequential, is returned whole.
    """
    name = layer.removesuffix(".base_layer")  # added by PEFT
    return next((part for part in reversed(name.split(".")) if not part.isdigit()), name)
