"""Direct FP4: the paper's baseline row "FP4"."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    MetisConfig,
    Scheme,
    register_scheme,
    stochastic_everywhere,
    three_operands,
)


@register_scheme(
    "nvfp4",
    summary="direct NVFP4, stochastic rounding everywhere",
    source="arXiv 2509.00404, section 4 and appendix",
)
def nvfp4(config: MetisConfig, rank: int) -> Scheme:
    """Quantize every operand directly to NVFP4, with block scales rounded up, as the paper says."""
    return three_operands(config, stochastic_everywhere(config))
