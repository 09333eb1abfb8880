"""The control for the extra parameters of Metis: a split weight, nothing quantized."""

from __future__ import annotations

from metis_hf.schemes.parts import RANK_MULTIPLE, MetisConfig, Scheme, SplitWeight, register_scheme


@register_scheme(
    "bf16-split",
    summary="control: weights stored as u, s, vh and residual; nothing quantized",
    source="arXiv 2509.00404, eq. W = U S V^T + W_R",
    rank_multiple=RANK_MULTIPLE,
)
def bf16_split(config: MetisConfig, rank: int) -> Scheme:
    """Return a split weight without FP4, to isolate the effect of Metis's extra parameters."""
    return Scheme(weight=SplitWeight(rank, unit_rms=True))
