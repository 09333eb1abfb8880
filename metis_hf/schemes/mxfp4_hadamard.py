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
    summary="MXFP4, nearest rounding, Hadamard without random signs in all three GEMMs",
    source="arXiv 2605.09825; ROCm TransformerEngine MXFP4BlockScaling with its Hadamard",
)
def mxfp4_hadamard(config: MetisConfig, rank: int) -> Scheme:
    """Rotate each GEMM's operands, and round to nearest in 1x32 blocks along its contraction.

    Every copy is made from the high-precision tensor.
    The rotation is Sylvester's 16x16 matrix / 4, twice in each block. Scales are powers of two by
    the rule "even" of the vendor's kernel: amax is between 3.5 and 7 times the scale.

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
