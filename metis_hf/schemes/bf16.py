"""The controls: nothing quantized, with a dense weight and with a split one."""

from __future__ import annotations

from metis_hf.config import MetisConfig
from metis_hf.schemes.base import Scheme, register_scheme


@register_scheme("bf16", summary="control: nothing quantized", source="torch.nn.Linear")
def bf16(config: MetisConfig, rank: int) -> Scheme:
    """A linear layer, bit for bit, in whatever precision the model or autocast runs."""
    return Scheme()


@register_scheme(
    "bf16-split",
    summary="control: weight stored as u, s, vh, residual; nothing quantized",
    source="arXiv 2509.00404, eq. W = U S V^T + W_R",
    rank_multiple=16,
)
def bf16_split(config: MetisConfig, rank: int) -> Scheme:
    """The extra parameters of Metis without FP4, to tell one's effect from the other's."""
    return Scheme(split_weight=True, unit_rms=True)
