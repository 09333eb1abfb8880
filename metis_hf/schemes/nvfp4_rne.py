"""Direct FP4 with nearest rounding in the forward pass."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    MetisConfig,
    Scheme,
    nearest_forward,
    register_scheme,
    three_operands,
)


@register_scheme(
    "nvfp4-rne",
    summary="direct NVFP4, nearest forward, stochastic gradients",
    source="arXiv 2505.19115 (FP4 All the Way)",
)
def nvfp4_rne(config: MetisConfig, rank: int) -> Scheme:
    """Quantize every operand directly to NVFP4; only gradients are rounded stochastically.

    The paper leaves two choices open. Here, block scales are rounded to nearest in the forward pass
    and up for gradients, so that gradients are unbiased; the input of wgrad is rounded as in fprop.
    """
    return three_operands(config, nearest_forward(config))
