"""Names of layers, as models give them."""

from __future__ import annotations


def group_of(layer: str) -> str:
    """Return the last part of a layer's name that is no index: q_proj, down_proj, c_attn, ..."""
    parts = layer.removesuffix(".base_layer").split(".")  # which PEFT adds
    return next(part for part in reversed(parts) if not part.isdigit())
