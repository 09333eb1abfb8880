"""UFP4: a uniform grid of four bits, and a rotation in all three GEMMs."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    UFP4,
    Hadamard,
    MetisConfig,
    Scheme,
    key_of,
    quantizer,
    refuse_shared,
    register_scheme,
    rotated_scheme,
)


@register_scheme(
    "ufp4",
    summary="uniform grid (E1M2) with fp32 block scales, Hadamard in all three GEMMs",
    source="arXiv 2606.20381 (UFP4)",
)
def ufp4(config: MetisConfig, rank: int) -> Scheme:
    """Rotate and quantize each GEMM's operands, in 1x16 blocks along the contracted dimension.

    Every copy is made from the high-precision tensor; gradients are rounded stochastically.
    A block has one fp32 scale, amax / 7, and integers up to 7: the values of E1M2, times a power of
    two. Assumed: the rotation has blocks of 16, and the config's seed fixes its random signs.

    Raises:
        ValueError: `operand_mode="shared"`: the recipe is defined by its per-GEMM copies.
    """
    refuse_shared(config)
    forward = quantizer(config, rounding="nearest", scale_rounding="nearest", fmt=UFP4)
    backward = quantizer(
        config, rounding="stochastic", scale_rounding="nearest", backward=True, fmt=UFP4
    )
    rotation = Hadamard(seed=key_of("hadamard", config.seed).static)
    own_copies = config.replace(operand_mode="contraction")
    return rotated_scheme(own_copies, (forward, backward), rotation)
