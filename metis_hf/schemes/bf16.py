"""The control: nothing quantized."""

from __future__ import annotations

from metis_hf.schemes.parts import MetisConfig, Scheme, register_scheme


@register_scheme("bf16", summary="control: nothing quantized", source="torch.nn.Linear")
def bf16(config: MetisConfig, rank: int) -> Scheme:
    """Return a plain linear layer, bit for bit, in the precision of the model or of autocast."""
    return Scheme()
