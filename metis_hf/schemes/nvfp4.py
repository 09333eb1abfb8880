"""Direct FP4: the paper's baseline row "FP4"."""

from __future__ import annotations

from metis_hf.schemes.parts import MetisConfig, Operand, Scheme, in_mode, quantizer, register_scheme


@register_scheme(
    "nvfp4",
    summary="direct NVFP4, stochastic rounding everywhere",
    source="arXiv 2509.00404, section 4 and appendix",
)
def nvfp4(config: MetisConfig, rank: int) -> Scheme:
    """Return every operand straight to NVFP4; block scales rounded up, as the paper says."""
    forward = quantizer(config, rounding="stochastic", scale_rounding="up")
    backward = quantizer(config, rounding="stochastic", scale_rounding="up", backward=True)
    scheme = Scheme(
        fprop_input=Operand(forward),
        fprop_weight=Operand(forward),
        dgrad_grad_output=Operand(backward),
    )
    return in_mode(scheme, config.operand_mode or "shared")
