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
    """Round every operand to MXFP4. There is no tensor scale: `two_level` changes nothing.

    The specification rounds scales down to a power of two, which lets magnitudes up to 8 meet a
    largest code of 6. So it is in the forward pass; gradients have scales rounded up, where nothing
    clips, else stochastic rounding would be biased.
    """
    forward = quantizer(config, rounding="nearest", scale_rounding="floor", fmt=MXFP4)
    backward = quantizer(
        config, rounding="stochastic", scale_rounding="up", backward=True, fmt=MXFP4
    )
    return three_operands(config, (forward, backward))
