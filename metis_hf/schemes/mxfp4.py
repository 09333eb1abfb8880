"""Direct MXFP4: blocks of 32 with power-of-two scales."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    MXFP4,
    MetisConfig,
    Scheme,
    quantizer,
    register_scheme,
    three_operands,
)


@register_scheme(
    "mxfp4",
    summary="direct MXFP4 (blocks of 32, E8M0 scales), nearest forward, stochastic gradients",
    source="OCP Microscaling Formats (MX) v1.0",
)
def mxfp4(config: MetisConfig, rank: int) -> Scheme:
    """Quantize every operand to MXFP4, which has no tensor scale: `two_level` has no effect.

    The specification rounds scales down to a power of two, so that magnitudes of up to 8 clip to
    the largest code, 6. The forward pass does the same. Gradients have scales rounded up, so that
    nothing clips: clipping would bias stochastic rounding.
    """
    forward = quantizer(config, rounding="nearest", scale_rounding="floor", fmt=MXFP4)
    backward = quantizer(
        config, rounding="stochastic", scale_rounding="up", backward=True, fmt=MXFP4
    )
    return three_operands(config, (forward, backward))
