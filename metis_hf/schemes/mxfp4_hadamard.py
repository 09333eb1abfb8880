"""MXFP4 with a Hadamard rotation without random signs in all three GEMMs."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    MXFP4,
    Hadamard,
    MetisConfig,
    Scheme,
    quantizer,
    refuse_shared,
    register_scheme,
    rotated_scheme,
)


@register_scheme(
    "mxfp4-hadamard",
    summary="MXFP4, nearest everywhere, Hadamard without random signs in all three GEMMs",
    source="arXiv 2605.09825; ROCm TransformerEngine MXFP4BlockScaling with its Hadamard",
)
def mxfp4_hadamard(config: MetisConfig, rank: int) -> Scheme:
    """Rotate and round to nearest each GEMM's operands, 1x32 along what it contracts.

    Every copy is made from the high-precision tensor.
    The rotation is Sylvester's matrix of 16 over 4, two of them in a block. Scales are powers of
    two by the rule "even" of the vendor's kernel: amax comes to between 3.5 and 7 of them.

    Raises:
        ValueError: `operand_mode="shared"`: the recipe is defined by its per-GEMM copies.
    """
    refuse_shared(config)
    forward = quantizer(config, rounding="nearest", scale_rounding="even", fmt=MXFP4)
    backward = quantizer(
        config, rounding="nearest", scale_rounding="even", backward=True, fmt=MXFP4
    )
    rotation = Hadamard(seed=None)
    own_copies = config.replace(operand_mode="contraction")
    return rotated_scheme(own_copies, (forward, backward), rotation)
